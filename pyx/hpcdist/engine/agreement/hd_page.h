/* The page through which the ranks of a node agree on each call of a group: its layout, and its
 * protocol in the terms of tests/model/check.pml, the model of it. Nothing here waits; hd_check.c
 * does.
 *
 * A rank *reaches* check n in one of two ways. It *joins*: it publishes its fields and takes
 * part. Or it *passes*: the check is abandoned, and the rank only goes by. Both are one swap of
 * its word. A check is *decided* when all ranks have joined it; then every rank that looks finds
 * all fields in place, and all ranks find the same outcome.
 *
 * A rank that gives up on n puts a *veto* into the word of a rank that has not reached n. The late
 * rank must swap that same word to reach n. So either the veto is first, and the rank can only
 * pass; or the rank is first, and the veto fails. So n is abandoned exactly if some rank can never
 * join it, and then no rank can find n decided.
 *
 * The fields of n are stored where those of n-2 were. A rank publishes them only after all ranks
 * have reached n-1, and so have left n-2. A rank that decided n-1 has seen that; after an
 * abandoned check it has to look, and may have to wait.
 *
 * A rank may still be inside n while others are far ahead, having abandoned one check after the
 * other. It can tell how n ended: no rank decides a later check without it, so a rank that is past
 * n has decided n if and only if n is the last check it decided. */
#ifndef HD_PAGE_H
#define HD_PAGE_H

#include <stdint.h>

#include "hd_job.h"

size_t hd_page_size(int nranks);

/* Ranks of a group whose calls of a few bytes travel with the check, and bytes of a rank's
 * contribution: in its slot, and in lines beside it. */
#define HD_CARRY_RANKS 16
#define HD_SMALL 8
#define HD_CARRIED 1024
/* Ranks that list in the page what each sends to each. */
#define HD_PAIR_RANKS 8

/* Of hd_fields.flags. */
enum { HD_UNEVEN = 1, HD_POLLS = 2, HD_CARRIES = 4, HD_DIRECT = 8 };

/* What a rank publishes of its call. */
typedef struct hd_fields {
    uint64_t hash;
    union {
        int64_t count;
        char small[HD_SMALL]; /* the contribution, where the fingerprint covers the count */
    };
    uint32_t flags, unused;
} hd_fields;

typedef struct hd_slot {
    uint64_t word;    /* high half: the check this rank has reached; then one bit: it joined it;
                       * 31 bits: vetoed up to */
    hd_fields d[2];   /* of even and of odd checks */
    uint32_t decided; /* last check this rank decided before it reached the present one */
    uint32_t core;    /* where this rank runs, see hd_core */
} __attribute__((aligned(HD_LINE))) hd_slot;

/* The tensor that travels from one rank to another. */
typedef struct hd_extent {
    int64_t n;
    uint64_t form;
} hd_extent;

typedef struct hd_payload {
    char bytes[2][HD_CARRIED];
    hd_extent extents[2][2 * HD_PAIR_RANKS]; /* what it sends to each rank, and expects from it */
} __attribute__((aligned(HD_LINE))) hd_payload;

/* Others can still read the last few reasons of a rank that gives up again and again. */
#define HD_NOTES 4

/* HD_INTERRUPTED: a signal handler raised. */
enum hd_why { HD_INTERRUPTED = 1, HD_GAVE_UP, HD_CROSSED, HD_REFUSED };

/* Why a rank abandoned a check. It informs; it decides nothing. */
typedef struct hd_note {
    uint32_t check;
    int32_t why;  /* enum hd_why */
    int32_t code; /* the error code of the others' calls */
    double after; /* seconds that it had waited */
    char text[HD_DESC] __attribute__((aligned(8)));
} hd_note;

enum hd_closed { HD_OPEN = 0, HD_DESTROYED, HD_DROPPED /* no reference was left */ };

/* What a rank reports in words; on slow paths only. */
typedef struct hd_words {
    uint32_t seq[2]; /* the check that said[] belongs to */
    hd_description said[2];
    hd_note notes[HD_NOTES];
    uint64_t refused;     /* the last run of checks that this rank refused one after the other: the
                           * first (high half) and the last */
    int64_t unread;       /* once closed: see hd_comm.unread */
    int32_t refused_code; /* of all of that run; HD_ERR_MISMATCH if they differ */
    int32_t closed;       /* this rank has left the group: enum hd_closed */
} __attribute__((aligned(HD_LINE))) hd_words;

struct hd_page {
    hd_slot slots[1]; /* one per rank; then, in a small group, their payloads; then their words */
};

_Static_assert(sizeof(hd_slot) == HD_LINE, "a slot is one cache line");

static inline hd_payload *hd_payloads(const hd_comm *c)
{
    return (hd_payload *)(c->page->slots + c->size);
}
static inline hd_words *hd_words_of(const hd_comm *c)
{
    return (hd_words *)(hd_payloads(c) + (c->size <= HD_CARRY_RANKS ? c->size : 0));
}

/* Check numbers wrap. */
static inline int hd_reached(uint32_t a, uint32_t n) { return (int32_t)(a - n) >= 0; }

/* Lets a wait for `rank` see on which cores both run. */
static inline void hd_page_cores(const hd_comm *c, hd_waiter *w, int rank)
{
    w->core = &c->page->slots[c->rank].core;
    w->their_core = &c->page->slots[rank].core;
}

/* Whether `rank` has reached check n. */
static inline int hd_page_arrived(const hd_comm *c, int rank, uint32_t n)
{
    return hd_reached((uint32_t)(__atomic_load_n(&c->page->slots[rank].word, __ATOMIC_ACQUIRE) >>
                                 32),
                      n);
}

/* Whether `rank` has left the group for good, and goes on without it: it has ended all its calls,
 * or waits for none of them any more, and makes no other. Who leaves the group of all ranks leaves
 * the job: hd_session_gone(). */
static inline enum hd_closed hd_page_closed(const hd_comm *c, int rank)
{
    if (c->as_world)
        return HD_OPEN;
    return (enum hd_closed)__atomic_load_n(&hd_words_of(c)[rank].closed, __ATOMIC_ACQUIRE);
}

static inline const char *hd_page_way(enum hd_closed closed)
{
    return closed == HD_DROPPED ? "dropped all references to it" : "destroyed it";
}

/* What a rank that has published its fields of n, or is about to, sees of another rank. */
enum hd_sight { HD_NOT_YET, HD_JOINED, HD_ABANDONED };
enum hd_sight hd_page_look(const hd_comm *c, int rank, uint32_t n);

/* Whether the fields of n may be published: -1 if so, else the first rank that has not reached
 * n-1. */
int hd_page_behind(const hd_comm *c, uint32_t n);

/* 1: joined; 0: there was a veto, and this rank has passed. Publish its fields first. */
int hd_page_join(hd_comm *c, uint32_t n);
void hd_page_pass(hd_comm *c, uint32_t n);

/* Vetoes n for all ranks that have not reached it, and lists them. 0: all have arrived; the check
 * goes on. */
int hd_page_veto(hd_comm *c, uint32_t n, hd_text *missing);

/* Records this rank's reason to abandon n, and finds the best one that any rank has left; 0: there
 * is none. */
void hd_page_leave_note(hd_comm *c, uint32_t n, int why, int code, double after, const char *text);
int hd_page_find_note(const hd_comm *c, uint32_t n, int *rank, hd_note *out);
/* The ranks that refused n for the same reason as that note, which rank `by` wrote. */
void hd_page_refused(const hd_comm *c, uint32_t n, int by, const hd_note *note, hd_refused *out);

#endif
