/* What the members of a roll call say to each other, and why one fails. */
#ifndef HD_ROLL_WORDS_H
#define HD_ROLL_WORDS_H

#include <mpi.h>
#include <stddef.h>
#include <stdint.h>

#include "hd_comm.h"

typedef struct hd_roll {
    MPI_Comm mpi;              /* of the messages; uses two of the engine's own tags, `tag` and
                                * the next */
    const hd_session *session; /* for hd_mpi_lock; NULL while only this thread uses MPI */
    int64_t *unread;           /* as hd_comm.unread; or NULL */
    const int *ranks;          /* the members, ranks of mpi: the first one leads */
    int n, rank, tag;
    uint64_t list;        /* what the members must agree on, */
    int level;            /* and their level of the entry check */
    struct hd_desk *desk; /* where other threads hold roll calls at the same time; or NULL */
    uint64_t uid;         /* result: a random number, the same on all members */
    int64_t until;        /* ns of hd_now() */
    /* Why no group can be made any more: HD_ROLL_VAIN, HD_ROLL_CLOSED or 0. NULL, or asked every
     * 50 ms. */
    int (*vain)(const hd_comm *parent);
    const hd_comm *parent;
    int mpi_error;  /* result, with HD_ERR_BACKEND */
    int advised;    /* result: the error text says what to do */
    char text[320]; /* the error text */

    /* The desk's: */
    struct hd_roll *next;
    struct hd_letter *letters; /* words for this call that other threads have received */
    uint64_t number;           /* of this call */
    int several;               /* other threads of the process could call new_group */
} hd_roll;

enum { HD_HELLO = 1, HD_GO, HD_REPORT, HD_PROMISE, HD_BYE, HD_VERDICT };

enum {
    HD_ROLL_SILENT = 1,  /* the time is over */
    HD_ROLL_ALONE,       /* no word from the leader, `who`, either */
    HD_ROLL_GAVE_UP,     /* `who` has */
    HD_ROLL_INTERRUPTED, /* `who` was, by a signal handler */
    HD_ROLL_VAIN,        /* `who` has found that the default group is being reconfigured */
    HD_ROLL_CLOSED,      /* `who` destroys the group whose members they are */
    HD_ROLL_LISTS,       /* `who` names other members than `than` */
    HD_ROLL_LEVELS,      /* `who` has another level than `than` */
};

#define HD_ROLL_NAMED 32

typedef struct hd_reason {
    int32_t why, code; /* 0: none, all go on */
    int32_t who, than; /* ranks */
    int32_t levels[2]; /* of `than` and of `who` */
    int32_t missing;   /* members without a word */
    /* The first of them: ranks in a verdict. On the way up places in the list, of those alone whose
     * parents are there. */
    int32_t named[HD_ROLL_NAMED];
} hd_reason;

typedef struct hd_word {
    int16_t what, several; /* several: as in hd_roll */
    int32_t level;
    uint64_t number;  /* of the call of the lower one of the two members */
    uint64_t list;    /* the sender's */
    uint64_t uid;     /* in a farewell the list of reason.who */
    hd_reason reason; /* of HD_BYE and HD_VERDICT; of HD_REPORT: who is missing */
} hd_word;

/* Both return a code, with r->text. */
int hd_roll_say(hd_roll *r, int to, int tag, const hd_word *w);
/* Receives one word of a rank. *there: whether there was one. */
int hd_roll_hear(hd_roll *r, int from, int tag, hd_word *w, int *there);
/* Waits until MPI has taken the words: outside hpcdist it may be long before MPI can send them. */
void hd_roll_flush(const hd_roll *r);

/* Receives the messages that are left over from roll calls with this tag, under hd_mpi_lock.
 * Returns their number. */
int64_t hd_roll_sweep(MPI_Comm mpi, int tag);

void hd_roll_name(hd_reason *reason, int32_t member);
void hd_roll_sort(hd_reason *reason);
void hd_roll_explain(const hd_reason *reason, char *text, size_t room);

#endif
