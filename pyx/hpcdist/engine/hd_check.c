/* The entry check: before data moves, the ranks of a group agree on what they are about to do.
 *
 * On one node it goes through a page of shared memory. Every rank owns a slot (one cache line) and
 * publishes there the number of the check it has entered with a fingerprint of its call; then it waits
 * until all others have entered, and compares. Two sets of fields suffice, used in turn: a rank publishes
 * check N+2 only after everybody entered N+1, and so finished reading N.
 *
 * Giving up must be one decision for all: a rank that proceeds to the data while another has timed out
 * would hang. So a rank that gives up on check N puts a veto into the slot of each member that has not
 * come, by compare-and-swap on the word that the late member must itself swap to enter. Either the veto
 * is first - then N is abandoned for everyone - or the member was first, and waiting goes on. Nothing has
 * been sent, so the group stays usable. Whoever leaves an abandoned check writes its number to a log
 * first, because the fields of a check may be reused once somebody left it that way.
 *
 * A reduction of a few bytes travels with its fingerprint: up to 8 bytes in the slot itself, up to 64 in a
 * line beside it. Everyone combines the contributions in the order of the ranks, so all get the same bits,
 * and no MPI call is made. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "hd_engine.h"
#include "hd_kernels.h"

#define LOG 64       /* abandoned checks remembered */
#define AFTER(a, b) ((int32_t)((a) - (b)) >= 0) /* check numbers wrap */

typedef struct fields {
    uint64_t hash;
    union {
        int64_t count;
        char tiny[8]; /* the contribution, where the fingerprint covers the count */
    };
    uint32_t uneven, polls;
} fields;

typedef struct slot {
    uint64_t word;    /* high half: last check entered; low half: vetoed up to */
    fields d[2];
} __attribute__((aligned(HD_LINE))) slot;

typedef struct payload {
    char bytes[2][HD_TINY];
} __attribute__((aligned(HD_LINE))) payload;

typedef struct words {
    uint32_t seq[2];  /* which check text[] belongs to */
    int32_t veto_by;  /* who gave up on this rank */
    int32_t veto_code;
    double veto_after;
    char text[2][HD_DESC];
    int64_t unread;   /* once closed: see hd_comm.unread */
    int32_t closed;   /* this rank frees the group */
} __attribute__((aligned(HD_LINE))) words;

struct hd_page {
    uint32_t nlog, reserved;
    uint32_t log[LOG];
    int32_t log_code[LOG]; /* with what its members' calls end */
    slot slots[] __attribute__((aligned(HD_LINE)));
    /* payload payloads[n], then words words[n] follow */
};

_Static_assert(sizeof(slot) == HD_LINE, "a slot is one cache line");

static payload *payloads_of(const hd_comm *c)
{
    return (payload *)(c->page->slots + c->size);
}

static words *words_of(const hd_comm *c)
{
    return (words *)(payloads_of(c) + c->size);
}

size_t hd_page_size(int n)
{
    return sizeof(hd_page) + (size_t)n * (sizeof(slot) + sizeof(payload) + sizeof(words));
}

int hd_page_leave(hd_comm *c, double seconds)
{
    words *all = words_of(c);
    int64_t left = 0;
    hd_waiter w;

    all[c->rank].unread = hd_comm_unread(c);
    __atomic_store_n(&all[c->rank].closed, 1, __ATOMIC_RELEASE);
    hd_waiter_init(&w, hd_session_spin(c->session, 0), seconds);
    for (int r = 0; r < c->size; r++) {
        while (!__atomic_load_n(&all[r].closed, __ATOMIC_ACQUIRE)) {
            const int ev = hd_waiter_step(&w);
            if ((ev & HD_WAIT_EXPIRED) || ((ev & HD_WAIT_HOOK) && hd_session_gone(c->session, c->node_slot[r])))
                return 0;
        }
        left += all[r].unread;
    }
    return left == 0;
}

static uint32_t entered(uint64_t w) { return (uint32_t)(w >> 32); }
static uint32_t vetoed(uint64_t w) { return (uint32_t)w; }
static uint64_t pack(uint32_t e, uint32_t v) { return ((uint64_t)e << 32) | v; }
static uint64_t load(const uint64_t *w) { return __atomic_load_n(w, __ATOMIC_ACQUIRE); }

static void log_abandoned(hd_page *p, uint32_t n, int code)
{
    uint32_t i = __atomic_fetch_add(&p->reserved, 1, __ATOMIC_ACQ_REL);
    __atomic_store_n(&p->log_code[i % LOG], code, __ATOMIC_RELEASE);
    __atomic_store_n(&p->log[i % LOG], n, __ATOMIC_RELEASE);
    __atomic_fetch_add(&p->nlog, 1, __ATOMIC_ACQ_REL);
}

/* New entries since this rank last looked? Then: is n among them? With which code? */
static int in_log(hd_comm *c, uint32_t n)
{
    uint32_t k = __atomic_load_n(&c->page->nlog, __ATOMIC_ACQUIRE);
    if (k == c->seen_log)
        return 0;
    for (int i = 0; i < LOG; i++)
        if (__atomic_load_n(&c->page->log[i], __ATOMIC_ACQUIRE) == n)
            return __atomic_load_n(&c->page->log_code[i], __ATOMIC_ACQUIRE);
    c->seen_log = k;
    return 0;
}

static int fail_abandoned(hd_comm *c, hd_job *j, uint32_t n, int late_rank, int code)
{
    char buffer[HD_TEXT];
    hd_text t;
    words *w = words_of(c);

    if (late_rank >= 0)
        code = w[late_rank].veto_code;
    log_abandoned(c->page, n, code);
    if (hd_fail_if_gone(c, j)) /* somebody gave up because a member has gone: say that */
        return j->code;
    hd_note_site(j);
    hd_text_init(&t, buffer, sizeof buffer);
    if (late_rank < 0) {
        hd_say(&t, "another rank gave up waiting in ");
        hd_say_call(&t, c, j);
    } else {
        const int by = w[late_rank].veto_by;
        if (late_rank == c->rank)
            hd_say(&t, "this rank came too late: ");
        hd_say(&t, "rank %d gave up after %.3g s", by, w[late_rank].veto_after);
        if (by >= 0 && by < c->size && __atomic_load_n(&w[by].seq[n & 1], __ATOMIC_ACQUIRE) == n)
            hd_say(&t, " in %.*s", HD_DESC, w[by].text[n & 1]);
        hd_say(&t, late_rank == c->rank ? "; this rank enters with " : " because rank %d has not joined ", late_rank);
        hd_say_call(&t, c, j);
    }
    if (code == HD_ERR_MISMATCH)
        hd_say(&t, ". The ranks disagree about the order in which they use their groups");
    hd_say(&t, ". Nothing was transferred; the group can still be used.");
    hd_fail(j, code, "%s", buffer);
    return j->code;
}

/* Tries to abandon check n. 1: abandoned (missing ranks listed in t); 0: meanwhile everybody came. */
static int veto(hd_comm *c, uint32_t n, double after, int code, hd_text *missing)
{
    words *w = words_of(c);
    int any = 0;
    for (int r = 0; r < c->size; r++) {
        uint64_t *word = &c->page->slots[r].word;
        uint64_t old = load(word);
        while (!AFTER(entered(old), n)) {
            if (AFTER(vetoed(old), n)) { /* somebody else gave up on it too */
                any = 1;
            } else {
                w[r].veto_by = c->rank;
                w[r].veto_after = after;
                w[r].veto_code = code;
                if (!__atomic_compare_exchange_n(word, &old, pack(entered(old), n), 0, __ATOMIC_ACQ_REL,
                                                 __ATOMIC_ACQUIRE))
                    continue;
                any = 1;
            }
            hd_say(missing, "%s%d", missing->used ? ", " : "", r);
            break;
        }
    }
    if (any)
        log_abandoned(c->page, n, code);
    return any;
}

static int give_up(hd_comm *c, hd_job *j, uint32_t n, const hd_waiter *w, int interrupted)
{
    char buffer[HD_TEXT], names[256];
    hd_text t, missing;
    double after = hd_waiter_elapsed(w);
    slot *s = c->page->slots;

    hd_describe_here(words_of(c)[c->rank].text[n & 1], j); /* for those who come too late */
    __atomic_store_n(&words_of(c)[c->rank].seq[n & 1], n, __ATOMIC_RELEASE);
    hd_text_init(&missing, names, sizeof names);
    if (!veto(c, n, after, HD_ERR_TIMEOUT, &missing))
        return HD_OK;
    if (interrupted) {
        j->code = HD_ERR_INTERRUPT;
        return j->code;
    }
    hd_text_init(&t, buffer, sizeof buffer);
    hd_say(&t, "timeout after %.3g s in ", after);
    hd_say_call(&t, c, j);
    hd_say(&t, ": rank%s %s %s not joined.", strchr(names, ',') ? "s" : "", names,
           strchr(names, ',') ? "have" : "has");
    for (int r = 0; r < c->size && t.used < 1200; r++) {
        if (r == c->rank)
            continue;
        hd_say(&t, "\n  rank %d: ", r);
        if (AFTER(entered(load(&s[r].word)), n))
            hd_say(&t, "waits in the same call");
        else
            hd_session_report(c->session, c->node_slot[r], &t);
    }
    hd_say(&t, "\nNothing was transferred; the group can still be used.");
    hd_fail(j, HD_ERR_TIMEOUT, "%s", buffer);
    return j->code;
}

/* Ranks that call two groups in different orders wait for each other for ever. Rank r waits in check `other` of
 * group `where`. 0: it came meanwhile. */
static int crossed(hd_comm *c, hd_job *j, uint32_t n, const hd_waiter *w, int r, uint32_t other, const char *where)
{
    char buffer[HD_TEXT], names[256];
    hd_text t, missing;

    hd_describe_here(words_of(c)[c->rank].text[n & 1], j); /* for those who come too late */
    __atomic_store_n(&words_of(c)[c->rank].seq[n & 1], n, __ATOMIC_RELEASE);
    hd_text_init(&t, buffer, sizeof buffer);
    hd_say(&t, "the ranks disagree about the order in which they use their groups: rank %d ", r);
    hd_session_report(c->session, c->node_slot[r], &t);
    hd_say(&t, ", waiting for this rank to make call %u of group '%s', while this rank waits for it in ", other, where);
    hd_say_call(&t, c, j);
    hd_say(&t, ". Neither could go on. Nothing was transferred; make all ranks call their groups in one order, or pass "
               "async_op=True and wait afterwards.");
    hd_text_init(&missing, names, sizeof names);
    if (!veto(c, n, hd_waiter_elapsed(w), HD_ERR_MISMATCH, &missing))
        return HD_OK;
    hd_fail(j, HD_ERR_MISMATCH, "%s", buffer);
    return j->code;
}

static int disagree(hd_comm *c, hd_job *j, uint32_t n)
{
    words *w = words_of(c);
    int par = n & 1, rc;
    char *texts = calloc((size_t)c->size, HD_DESC);
    hd_waiter wait;

    if (!texts) {
        hd_fail(j, HD_ERR_MISMATCH, "the ranks disagree about collective #%u of group '%s'", j->seq, c->name);
        return j->code;
    }
    hd_describe_here(w[c->rank].text[par], j);
    __atomic_store_n(&w[c->rank].seq[par], n, __ATOMIC_RELEASE);
    hd_waiter_init(&wait, 0, 0.9); /* all are inside this call, and every one describes itself */
    for (int r = 0; r < c->size; r++) {
        while (__atomic_load_n(&w[r].seq[par], __ATOMIC_ACQUIRE) != n)
            if (hd_waiter_step(&wait) & HD_WAIT_EXPIRED)
                break;
        if (__atomic_load_n(&w[r].seq[par], __ATOMIC_ACQUIRE) == n) {
            memcpy(texts + (size_t)r * HD_DESC, w[r].text[par], HD_DESC);
            texts[(size_t)r * HD_DESC + HD_DESC - 1] = 0;
        }
    }
    rc = hd_fail_mismatch(c, j, texts, HD_DESC);
    free(texts);
    return rc;
}

static const char *contribution(const hd_comm *c, const hd_job *j, int rank, int par)
{
    const fields *d = &c->page->slots[rank].d[par];
    return j->tiny <= (int)sizeof d->tiny ? d->tiny : payloads_of(c)[rank].bytes[par];
}

static void combine(const hd_comm *c, hd_job *j, int par)
{
    const hd_reduce_fn reduce = hd_reduce_kernel(j->redop, j->dtype);
    char *out = j->out[0].ptr;
    memcpy(out, contribution(c, j, 0, par), (size_t)j->tiny);
    for (int r = 1; r < c->size; r++)
        reduce(contribution(c, j, r, par), out, j->count);
}

static int check_page(hd_comm *c, hd_job *j, uint64_t hash)
{
    hd_page *p = c->page;
    slot *s = p->slots, *me = &s[c->rank];
    const uint32_t n = ++c->check_seq;
    const int par = n & 1;
    int differ = 0, uneven = j->uneven, polls = j->polls, too_late = 0, code;
    uint32_t seen = 0;
    hd_waiter w;
    uint64_t old;

    const int64_t agreed = hd_agreed(j);

    me->d[par].hash = hash;
    if (j->tiny)
        memcpy(j->tiny <= (int)sizeof me->d[par].tiny ? me->d[par].tiny : payloads_of(c)[c->rank].bytes[par],
               j->own, (size_t)j->tiny);
    if (!j->tiny || j->tiny > (int)sizeof me->d[par].tiny)
        me->d[par].count = agreed;
    me->d[par].uneven = (uint32_t)j->uneven;
    me->d[par].polls = (uint32_t)j->polls;
    old = load(&me->word);
    do {
        /* Logged before the others can see this rank inside n: they then look at the log, not at the veto. */
        if (AFTER(vetoed(old), n) && !too_late) {
            too_late = 1;
            log_abandoned(p, n, words_of(c)[c->rank].veto_code);
        }
    } while (!__atomic_compare_exchange_n(&me->word, &old, pack(n, too_late ? vetoed(old) : n - 1), 0,
                                          __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE));
    if (too_late)
        return fail_abandoned(c, j, n, c->rank, 0);

    hd_waiter_init(&w, hd_session_spin(c->session, !j->inline_), j->timeout);
    for (int i = 1; i < c->size; i++) {
        int r = c->rank + i;
        if (r >= c->size)
            r -= c->size;
        for (;;) {
            uint64_t word = load(&s[r].word);
            int ev;
            if (AFTER(entered(word), n))
                break;
            if (AFTER(vetoed(word), n))
                return fail_abandoned(c, j, n, r, 0);
            ev = hd_waiter_step(&w);
            if (!ev)
                continue;
            if (ev & HD_WAIT_CLOCK)
                hd_session_progress(c->session);
            if (ev & HD_WAIT_HOOK) {
                int how;
                hd_session_note(c->session, j);
                if (j->inline_ && hd_py.slow && hd_py.slow(j)) {
                    if (give_up(c, j, n, &w, 1))
                        return j->code;
                    j->code = HD_ERR_INTERRUPT; /* all are here: finish the operation, then raise */
                }
                /* Gone, and truly not entered: read in this order. */
                how = hd_session_gone(c->session, c->node_slot[r]);
                if (how && !AFTER(entered(load(&s[r].word)), n)) {
                    char names[64];
                    hd_text t;
                    hd_text_init(&t, names, sizeof names);
                    veto(c, n, hd_waiter_elapsed(&w), HD_ERR_TIMEOUT, &t);
                    return hd_fail_gone(c, j, r, how);
                }
                if (j->inline_ && j->code == HD_OK) {
                    const char *where = "";
                    uint32_t other;
                    hd_session_blocked(c->session, c, n, w.limit < 0 ? 1e9 : j->timeout - hd_waiter_elapsed(&w));
                    other = hd_session_crossed(c->session, c, c->node_slot[r], &where);
                    /* Seen twice: 50 ms apart. */
                    if (other && other == seen && crossed(c, j, n, &w, r, other, where))
                        return j->code;
                    seen = other;
                }
            }
            if ((ev & HD_WAIT_EXPIRED) && give_up(c, j, n, &w, 0))
                return j->code;
        }
        differ |= s[r].d[par].hash != hash;
        if (!j->tiny) {
            differ |= !j->pairwise && s[r].d[par].count != agreed;
            uneven |= s[r].d[par].uneven || s[r].d[par].count != agreed;
        }
        polls |= (int)s[r].d[par].polls;
    }
    if ((code = in_log(c, n)))
        return fail_abandoned(c, j, n, -1, code);
    if (differ)
        return disagree(c, j, n);
    if (j->tiny)
        combine(c, j, par);
    j->uneven = uneven && j->pairwise;
    j->polls = polls;
    return HD_OK;
}

int hd_check(hd_comm *c, hd_job *j, uint64_t hash)
{
    return c->page ? check_page(c, j, hash) : hd_check_mpi(c, j, hash);
}

