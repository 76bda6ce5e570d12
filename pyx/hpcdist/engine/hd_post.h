/* The post of a group that spans nodes: what its entry check sends through MPI, on a communicator
 * of its own. See hd_check_mpi.c for the protocol. A *ballot* is the memory of a check's rounds, a
 * *note* a message from one rank to all others that no rank waits for. */
#ifndef HD_POST_H
#define HD_POST_H

#include <mpi.h>
#include <stdint.h>

#include "hd_job.h"
#include "hd_outbox.h"

/* What the first round compares, and LATE: who was last in the check before. VOTE is their number.
 */
enum { HASH, NOT_HASH, COUNT, NOT_COUNT, UNEVEN, POLLS, REFUSES, LATE, VOTE };

enum { HD_POST_HERE = 1, HD_POST_GAVE_UP, HD_POST_REFUSED };

typedef struct hd_post_note {
    int32_t what, code; /* code: the error code of the others' calls */
    uint64_t check;
    double after; /* seconds, of HD_POST_GAVE_UP */
    char text[HD_DESC];
} hd_post_note;

/* A received note, of this check or a later one. */
typedef struct hd_post_heard {
    struct hd_post_heard *next;
    int by;
    hd_post_note note;
} hd_post_heard;

/* What MPI may still read and write of one check. */
typedef struct hd_ballot {
    struct hd_ballot *next;
    uint64_t vote[VOTE];
    uint64_t seen;      /* this rank has seen the first round end; after the second: all ranks
                         * have */
    int voted;          /* this rank's vote in the second round is with MPI */
    MPI_Request req[2]; /* of the rounds */
} hd_ballot;

typedef struct hd_post {
    MPI_Comm mpi;
    int64_t unread;           /* notes sent, less those received */
    uint64_t now;             /* the check this rank is in */
    hd_ballot *ballot, *left; /* the one in use; those left behind */
    hd_outbox sent;
    hd_post_heard *heard;
    int *others; /* the ranks but this one */
    int announced;
    int64_t waited; /* ns: in the first round of the last check */
} hd_post;

int hd_post_open(hd_comm *c);                /* collective over the group */
int hd_post_close(hd_comm *c, int together); /* 0: requests are left that no rank matched */
int64_t hd_post_unread(hd_comm *c);          /* messages sent, less those received */

hd_ballot *hd_post_ballot(void); /* NULL: no memory */
/* Frees what MPI is done with; under hd_mpi_lock. 1: nothing is left. */
int hd_post_tidy(hd_post *p);

void hd_post_send(hd_comm *c, int what, int code, double after, const char *text);
/* Waits until MPI has taken this rank's notes: outside hpcdist it may be long before MPI can send
 * them. */
void hd_post_flush(hd_comm *c);
void hd_post_read(hd_comm *c); /* receives all notes that are there */
/* Drops the notes of checks before `before`; all notes if it is 0. */
void hd_post_forget(hd_post *p, uint64_t before);
int hd_post_is_here(const hd_post *p, int rank); /* it has said so */
/* The note with the best reason that shows that the present check is abandoned; NULL: none. */
const hd_post_heard *hd_post_reason(const hd_post *p);
/* The ranks that refused the present check for the same reason as that note. */
void hd_post_refused(const hd_post *p, const hd_post_heard *like, hd_refused *out);

#endif
