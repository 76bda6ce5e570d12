/* The two rounds of an entry check between nodes, in messages of the engine's own. What they decide
 * is in hd_check_mpi.c.
 *
 * A round is an all-reduce. Among up to HD_ROUNDS_DIRECT ranks each swaps what it contributes with
 * all others at once: a rank waits once for a round, and where cores are short each wait costs a
 * turn. Among more it goes by recursive doubling: in each step a rank and a partner swap what they
 * know, and the steps double how many ranks that is. Where the ranks are no power of two, those
 * beyond it give their part to a partner first and get the outcome at the end. MPI's nonblocking
 * all-reduce would do, but takes longer, and once it has begun every rank must help it to its end.
 *
 * Of a letter each rank sends what the other one needs, where it writes to all others.
 *
 * Between two partners goes one *ballot* in each round, in order, in one message or several that
 * are sent at once. A rank that leaves a check sends at once all that it has not sent yet, *void*:
 * a refusal in the first round, a no in the second. So a round ends for the others as if it had
 * stayed. What it leaves unread it takes in a later check, or at the end, and knows it by its
 * number. A check that ends with its first round has no ballots of the second one, but for those of
 * ranks that leave it. At the end also those of checks that it has never begun: MPI gives a freed
 * communicator's number, and what is unread there, to the next one.
 */
#ifndef HD_ROUNDS_H
#define HD_ROUNDS_H

#include <mpi.h>
#include <stdint.h>

#include "hd_ballot.h"
#include "hd_outbox.h"

/* Up to so many ranks send their ballots to all others. */
#ifndef HD_ROUNDS_DIRECT
#define HD_ROUNDS_DIRECT 8
#endif

enum hd_round { HD_FIRST_ROUND, HD_SECOND_ROUND, HD_ROUNDS };

struct hd_partner; /* one of those that a rank exchanges ballots with */

/* All zero at first. */
typedef struct hd_rounds {
    MPI_Comm mpi;
    int rank, n;   /* partners, in the order in which this rank hears from them */
    int core;      /* the largest power of two up to the number of ranks */
    int is_direct; /* these are all others */
    int helps;     /* the first of them is beyond the power of two: its part comes first */
    int is_beyond; /* this rank is, and has one partner */
    struct hd_partner *partners; /* NULL: not opened yet */
    int room;                    /* partners for which there is memory */
    uint64_t check;              /* the one that this rank is in, or was in last */
    enum hd_round round;
    int heard, said;       /* partners, in this round */
    int begun, voted;      /* this rank takes part in the first round, in the second one */
    uint64_t seen;         /* it has seen the first round end; after the second one: all have */
    hd_outbox late;        /* ballots for partners that have not taken an earlier one */
    int64_t unread;        /* messages sent, less those taken; over all ranks: what is unread */
    int over;              /* this rank begins no check any more */
    uint64_t went, stayed; /* bits of the checks before, as in a vote */
    int is_fast; /* checks may end with their first round: the second one's ballots may never come
                  */
    hd_first first; /* what it contributes */
    /* What all contribute, once the first round has ended, as far as it is needed here. */
    const hd_first *all;
    /* Among ranks that write to all others: which part of the letter each of them needs. */
    hd_span needs[HD_ROUNDS_DIRECT];
} hd_rounds;

/* A new check; the caller fills in `first` and `needs` until the round begins. */
void hd_rounds_enter(hd_rounds *r, uint64_t check);

/* All below are called under hd_mpi_lock and return MPI's code; `mpi` is the same in each call.
 * Begin and continue a round; *ended: it has. */
int hd_rounds_first(hd_rounds *r, MPI_Comm mpi, int *ended);
int hd_rounds_second(hd_rounds *r, int *ended); /* votes yes, if it has not begun */
/* Leaves the check: sends void ballots in the place of all that are due. */
int hd_rounds_leave(hd_rounds *r, MPI_Comm mpi);

/* Takes what this rank has left unread, up to the present check. 1: all, and MPI is done with what
 * was sent. */
int hd_rounds_tidy(hd_rounds *r);
/* Lets MPI send. 1: there is something that it has not sent yet. */
int hd_rounds_unsent(hd_rounds *r);
/* From now on hd_rounds_tidy takes what is there of any check, and returns 1 if MPI is done with
 * what was sent; `unread` of all ranks tells whether that is all. */
int hd_rounds_end(hd_rounds *r, MPI_Comm mpi);
void hd_rounds_close(hd_rounds *r); /* after it */

#endif
