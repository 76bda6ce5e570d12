/* The protocol of the ranks of a node in a check between nodes, one step per function: see
 * hd_caucus.h. */
#include <stddef.h>

#include "hd_ballot.h"
#include "hd_base.h"
#include "hd_caucus.h"

/* What one rank brings. It may write while the speaker still reads its vote of an earlier check:
 * then it has given that one up, which the speaker sees after it has read. */
typedef struct seat {
    uint64_t arrived; /* the check it has reached */
    uint32_t core;
    hd_first first; /* with as much data as there is room for */
} __attribute__((aligned(HD_LINE))) seat;

struct hd_hall {
    /* The last check for which the speaker has spoken, or which was given up, and which of both. */
    uint64_t stand __attribute__((aligned(HD_LINE)));
    /* The last check that went on (high half), and one before which none is open any more: the last
     * one that did not go on, or the one before the last that did. */
    uint64_t verdict __attribute__((aligned(HD_LINE)));
};

/* What the ranks of a node share for their letters takes no more than this, or what short ones
 * need: /dev/shm may be small. */
#define SHARED (128 << 10)

size_t hd_caucus_room(int ranks)
{
    const size_t each = SHARED / (size_t)ranks / 8 * 8;
    return each < HD_SHORT_LETTER ? HD_SHORT_LETTER : each < HD_LETTER ? each : HD_LETTER;
}

/* Behind that lie the ranks' seats, and one more for the outcome of the last check that went on. */
static size_t seat_bytes(size_t room)
{
    const size_t bytes = offsetof(seat, first.letter.data) + room;
    return (bytes + HD_LINE - 1) / HD_LINE * HD_LINE;
}

static seat *seat_of(const hd_caucus *k, int place)
{
    return (seat *)(void *)((char *)(k->at + 1) + (size_t)place * seat_bytes(k->room));
}

static hd_first *outcome_of(const hd_caucus *k) { return &seat_of(k, k->ranks)->first; }

size_t hd_caucus_bytes(int ranks, size_t room)
{
    return sizeof(struct hd_hall) + (size_t)(ranks + 1) * seat_bytes(room);
}

static uint64_t load(const uint64_t *word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }

static uint64_t stand_of(uint64_t n, int spoken) { return n << 1 | (spoken != 0); }

/* Takes a stand on check n, if nobody has yet. 0: somebody has, on this check or a later one. */
static int stand(hd_caucus *k, uint64_t n, int spoken)
{
    uint64_t old = load(&k->at->stand);
    while (old >> 1 < n)
        if (__atomic_compare_exchange_n(&k->at->stand, &old, stand_of(n, spoken), 0,
                                        __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
            return 1;
    return 0;
}

int hd_caucus_speak(hd_caucus *k, uint64_t n) { return stand(k, n, 1); }

/* Once the node is past n, the stand is of a later check, and the verdict has been there since. */
int hd_caucus_spoken(const hd_caucus *k, uint64_t n)
{
    const uint64_t now = load(&k->at->stand);
    return now == stand_of(n, 1) ||
           (now >> 1 > n && (uint32_t)(load(&k->at->verdict) >> 32) == (uint32_t)n);
}

int hd_caucus_given_up(const hd_caucus *k, uint64_t n)
{
    const uint64_t now = load(&k->at->stand);
    return now >> 1 >= n && now != stand_of(n, 1);
}

int hd_caucus_give_up(hd_caucus *k, uint64_t n)
{
    return stand(k, n, 0) || !hd_caucus_spoken(k, n);
}

/* ---- votes ---- */

static void put_first(hd_first *shared, const hd_first *from)
{
    hd_put_words((char *)shared, (const char *)from, hd_ballot_bytes(from));
}

/* One word contains which part of the letter there is, so its length is one that was written, also
 * if another rank writes meanwhile. */
static void get_first(hd_first *to, const hd_first *shared)
{
    const size_t head = offsetof(hd_first, letter.data);
    hd_get_words((char *)to, (const char *)shared, head);
    hd_get_words(to->letter.data, shared->letter.data, hd_ballot_bytes(to) - head);
}

void hd_caucus_arrive(hd_caucus *k, uint64_t n, const hd_first *mine)
{
    seat *s = seat_of(k, k->place);
    __atomic_thread_fence(__ATOMIC_RELEASE); /* whoever sees this vote sees its earlier stand */
    if (!hd_caucus_speaks(k))
        put_first(&s->first, mine);
    __atomic_store_n(&s->core, hd_core(), __ATOMIC_RELAXED);
    __atomic_store_n(&s->arrived, n, __ATOMIC_RELEASE);
}

void hd_caucus_cores(const hd_caucus *k, hd_waiter *w)
{
    w->core = &seat_of(k, k->place)->core;
    w->their_core = &seat_of(k, 0)->core;
}

int hd_caucus_complete(const hd_caucus *k, uint64_t n)
{
    for (int i = 1; i < k->ranks; i++)
        if (load(&seat_of(k, i)->arrived) < n)
            return 0;
    return 1;
}

/* The speaker writes no vote into its own seat, so each is copied there first: a thread's stack may
 * have no room for one. */
int hd_caucus_gather(hd_caucus *k, uint64_t n, hd_first *into)
{
    hd_first *next = &seat_of(k, 0)->first;
    for (int i = 1; i < k->ranks; i++) {
        get_first(next, &seat_of(k, i)->first);
        hd_ballot_combine(next, into);
    }
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    return !hd_caucus_given_up(k, n); /* whoever has written its next vote has given this one up */
}

/* ---- the verdict ---- */

void hd_caucus_conclude(hd_caucus *k, uint64_t n, const hd_first *outcome)
{
    const uint64_t decided = outcome ? n & UINT32_MAX : load(&k->at->verdict) >> 32;
    /* Never far behind: numbers are compared across their wrap. */
    const uint32_t failed = (uint32_t)(outcome ? n - 1 : n);
    if (outcome)
        put_first(outcome_of(k), outcome);
    __atomic_store_n(&k->at->verdict, decided << 32 | failed, __ATOMIC_RELEASE);
}

/* No later check goes on without this rank, so the outcome of n stays where it is. The stand is
 * read first: of a later check it says that the verdict of n is there, if there is one. */
int hd_caucus_listen(const hd_caucus *k, uint64_t n, const hd_first **out)
{
    const int given_up = hd_caucus_given_up(k, n);
    const uint64_t verdict = load(&k->at->verdict);
    if ((uint32_t)(verdict >> 32) == (uint32_t)n) {
        *out = outcome_of(k);
        return 1;
    }
    return given_up || (int32_t)((uint32_t)verdict - (uint32_t)n) >= 0 ? -1 : 0;
}
