/* The memory of the two rounds of an entry check between nodes, and how MPI combines the first
 * round: the votes, and beside them a *letter*, the data of a short call. See hd_check_mpi.c. */
#ifndef HD_BALLOT_H
#define HD_BALLOT_H

#include <mpi.h>
#include <stdint.h>

/* What the first round compares, and LATE: who was last in the check before. VOTE is their number.
 */
enum { HASH, NOT_HASH, COUNT, NOT_COUNT, UNEVEN, POLLS, REFUSES, LATE, VOTE };

/* Bytes of data in a letter. Every check sends one, whatever the ranks call, because they may
 * disagree. Neither may it depend on what they called before: a sum would get other bits. */
#define HD_LETTER 64

/* How the letters of the ranks become one. HD_NO_LETTER: some rank has no data, or they disagree.
 * HD_JOINED_LETTER: each rank fills a part of its own, and the rest is zero. */
enum hd_letter_kind { HD_NO_LETTER = 0, HD_JOINED_LETTER, HD_REDUCED_LETTER };

typedef struct hd_letter {
    uint8_t kind, dtype, redop, unused;
    uint32_t bytes;
    char data[HD_LETTER];
} hd_letter;

/* What a rank contributes to the first round; then, what all do. */
typedef struct hd_first {
    uint64_t vote[VOTE];
    hd_letter letter;
} hd_first;

/* What MPI may still read and write of one check. */
typedef struct hd_ballot {
    struct hd_ballot *next;
    hd_first first;
    uint64_t seen;      /* this rank has seen the first round end; after the second: all ranks
                         * have */
    int begun, voted;   /* this rank's votes in the first and in the second round are with MPI */
    MPI_Request req[2]; /* of the rounds */
} hd_ballot;

hd_ballot *hd_ballot_new(void); /* NULL: no memory */

/* Creates and frees what the first round needs of MPI, which must be up. init returns MPI's code;
 * a second call does nothing, and two threads must not call it at once. */
int hd_ballots_init(void);
void hd_ballots_free(void);

int hd_ballot_begin(hd_ballot *b, MPI_Comm mpi); /* the first round; returns MPI's code */
void hd_ballot_combine(const hd_first *in, hd_first *inout);

#endif
