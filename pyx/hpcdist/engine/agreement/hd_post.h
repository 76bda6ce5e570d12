/* The post of a group that spans nodes: what its entry check sends through MPI, on a communicator
 * of its own. See hd_check_mpi.c for the protocol. A *note* is a message to all other ranks that no
 * rank waits for: why a check is abandoned. In a group of up to HD_POST_STAR ranks its author sends
 * it to all. In a larger one it goes to the ranks 1, 2, 4, 8 and so on behind, and whoever leaves a
 * check because of a note passes it on likewise: so a rank sends O(log N) notes, and they reach
 * every rank that waits, as long as those on the way read them. */
#ifndef HD_POST_H
#define HD_POST_H

#include <mpi.h>
#include <stdint.h>

#include "hd_caucus.h"
#include "hd_here.h"
#include "hd_job.h"
#include "hd_outbox.h"
#include "hd_rounds.h"

#ifndef HD_POST_STAR
#define HD_POST_STAR 33
#endif

/* HD_POST_INTERRUPTED: a signal handler raised; HD_POST_LOST: a member has gone, and the text says
 * how; HD_POST_APART: a check has ended differently on the ranks, and the text says which. */
enum { HD_POST_GAVE_UP = 1, HD_POST_INTERRUPTED, HD_POST_LOST, HD_POST_REFUSED, HD_POST_APART };

typedef struct hd_post_note {
    int32_t what, code; /* code: the error code of the others' calls */
    int32_t by;         /* its author */
    uint64_t check;
    double after;       /* seconds that it had waited */
    char text[HD_DESC]; /* empty: the author does not know why */
} hd_post_note;

/* A received note, of this check, a later one, or one from which this rank has gone on. */
typedef struct hd_post_heard {
    struct hd_post_heard *next;
    hd_post_note note;
} hd_post_heard;

typedef struct hd_post {
    MPI_Comm mpi;
    hd_caucus *caucus; /* NULL: each rank takes part in the rounds itself */
    int64_t unread;    /* notes sent, less those received */
    uint64_t now;      /* the check this rank is in */
    uint64_t oldest;   /* notes of earlier checks are dropped */
    hd_outbox sent;
    int stuck; /* when the last note was sent, an earlier one was still unsent */
    hd_post_heard *heard;
    hd_here here;
    uint8_t *closed; /* atomic, by rank: it has destroyed the group */
    int *to, n_to;   /* the ranks that this one writes to */
    int passes_on;   /* these are not all others: notes have to be passed on */
    int64_t waited;  /* ns: in the first round of the last check */
    int64_t left;    /* ns: the end of the last check, at level fast */
    /* Which check has ended differently on the ranks, once one has: none succeeds any more. */
    char apart[HD_DESC];
    int apart_code;
    int kept; /* atomic: by the poller, see hd_unsent.h; and its list: */
    struct hd_post *next;
    hd_rounds rounds; /* at the end: of its letter only what is used is touched */
} hd_post;

/* The rounds are those of all ranks, or of one of each node. */
static inline int hd_post_votes(const hd_post *p)
{
    return !p->caucus || hd_caucus_speaks(p->caucus);
}

static inline MPI_Comm hd_post_voters(const hd_post *p)
{
    return p->caucus ? p->caucus->speakers : p->mpi;
}

/* Collective over the group. Returns an hd_code; *rc: of MPI, if that failed. */
int hd_post_open(hd_comm *c, int *rc);
int hd_post_close(hd_comm *c, int together); /* 0: requests are left that no rank matched */
/* This rank begins no check any more, and is to take what others have sent for later ones; under
 * hd_mpi_lock. */
void hd_post_end(hd_post *p);
int hd_post_by_nodes(const hd_comm *c); /* one rank of each node votes for its node */
/* Notes and lists sent, less those received. Ballots are not among them: in a check that ends well
 * each rank takes all that were sent before. */
int64_t hd_post_unread(hd_comm *c);

/* Takes what is left of earlier checks, and frees what MPI is done with; under hd_mpi_lock. 1:
 * nothing is left. */
int hd_post_tidy(hd_post *p);
/* Lets MPI send, under hd_mpi_lock. 1: there is something that it has not sent yet. */
int hd_post_unsent(hd_post *p);

void hd_post_send(hd_comm *c, int what, int code, double after, const char *text);
/* Waits until MPI has taken this rank's notes, as the program may end next. Not if it had not taken
 * those before: their reader is stopped, and the poller sends them when that one goes on. */
void hd_post_flush(hd_comm *c);
/* For a rank that leaves a check because of this note, or without one (NULL). */
void hd_post_pass_on(hd_comm *c, const hd_post_heard *h);
/* Sends what is due about the ranks that are here; `announce`: this one is, from now on. */
void hd_post_tell(hd_comm *c, int announce);
void hd_post_read(hd_comm *c); /* receives all that is there */
/* Drops the notes of checks before `before`, from now on too; all notes if it is 0. */
void hd_post_forget(hd_post *p, uint64_t before);
/* The note with the best reason why the present check is abandoned; NULL: none. */
const hd_post_heard *hd_post_reason(const hd_post *p);
/* Whether there is a note of that rank about the present check or a later one. */
int hd_post_has(const hd_post *p, int rank);
/* This rank destroys the group, and not all do: tells the others. */
void hd_post_close_early(hd_comm *c);
/* Whether that rank has said so; by any thread. It takes part in no check that it has not joined.
 */
int hd_post_closed(const hd_comm *c, int rank);
int hd_post_arrived(const void *post, int rank); /* the same, or it has said that it is there */
int hd_post_abandoned(
    const hd_post *p); /* the present check is, whether there is a reason or not */
/* Others may have gone on from the present check, which is over with its first round. */
int hd_post_may_be_short(const hd_post *p);
/* From now on no check succeeds: the text says why. */
void hd_post_part(hd_post *p, int code, const char *text);
/* The ranks that refused the present check for the same reason as that note. */
void hd_post_refused(const hd_post *p, const hd_post_heard *like, hd_refused *out);

#endif
