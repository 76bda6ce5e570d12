/* A communicator of the engine, one per group: MPI's, duplicated, with the entry check's memory and
 * the lane (FIFO and thread). hd_comm_life.c creates and frees it; this is what all files read. */
#ifndef HD_COMM_H
#define HD_COMM_H

#include <mpi.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

#include "hd_accord.h"
#include "hd_starving.h"

/* An engine for the standard ABI runs with any libmpi. */
#if defined OPEN_MPI || defined MPI_ABI
#define HD_MAYBE_OPEN_MPI
#endif

#define HD_NAME 64 /* bytes of a group's name */

typedef struct hd_comm hd_comm;
typedef struct hd_desk hd_desk;       /* hd_roll_desk.h */
typedef struct hd_job hd_job;         /* hd_job.h */
typedef struct hd_page hd_page;       /* hd_page.h */
typedef struct hd_session hd_session; /* hd_session.h */
typedef struct hd_split hd_split;     /* hd_split.h */

/* A group is destroyed: it takes no new operations; then waiting callers leave with an error. */
enum hd_closing { HD_COMM_OPEN = 0, HD_COMM_CLOSING, HD_COMM_CLOSED };

/* Operations in order: see hd_lane.h. */
typedef struct hd_lane {
    pthread_cond_t work_cv, done_cv;
    hd_job *head, *tail;
    int pending; /* atomic: jobs submitted to the thread and not done */
    int busy;    /* atomic: an inline job runs */
    int stop, started;
    pthread_t thread;
} hd_lane;

/* The first failure in the lane; operations queued behind it fail as well. */
typedef struct hd_failure {
    char *text;
    int code;
    uint32_t upto; /* operations that were begun before the program saw the failure ... */
    int unseen;    /* ... which it has not yet */
    int given_up;  /* the program has given up what it had begun, up to this number: a failure of
                    * those counts as seen */
    uint32_t given_up_to;
} hd_failure;

/* What the watchdog must know of a data transfer that cannot be cancelled. */
typedef struct hd_transfer {
    uint64_t phase;  /* atomic: odd while inside */
    const char *api; /* for the report; valid while `phase` is odd */
    uint32_t seq;
    int votes;           /* no data yet: the ranks tell each other whether to go on */
    int64_t until;       /* ns, its latest end; 0: `timeout` from when the watchdog saw it */
    double timeout;      /* the operation's own: the group's may have changed since */
    uint64_t seen_phase; /* the watchdog's memory */
    int64_t since;
    int tid; /* atomic: the thread that is inside, and how long it waited for a core */
    hd_starving starving;
    int64_t starved; /* ns */
} hd_transfer;

/* An agreement that timed out and goes on: see hd_comm_agree(). */
typedef struct hd_vote {
    int halves; /* of the flag's bits, agreed on so far */
    unsigned given, agreed;
    hd_accord half;
} hd_vote;

/* Once this rank has left the group and others may not have: see hd_graves.c. */
typedef struct hd_grave {
    hd_comm *next;
    int buried, orphan;  /* orphan: no Python object owns it any more */
    int step;            /* agreements begun, */
    MPI_Request parting; /* the present one, */
    int64_t unread;      /* and the number of messages never received */
} hd_grave;

/* Levels of the entry check: docs/sharp-bits.md. */
enum hd_check_level { HD_CHECK_OFF, HD_CHECK_ON, HD_CHECK_FULL, HD_CHECK_FAST };

static inline const char *hd_level_name(uint64_t level)
{
    static const char *const names[] = {[HD_CHECK_OFF] = "off",
                                        [HD_CHECK_ON] = "on",
                                        [HD_CHECK_FULL] = "full",
                                        [HD_CHECK_FAST] = "fast"};
    return level <= HD_CHECK_FAST ? names[level] : "?";
}

/* A rail, and the ranks of a node while they share memory out: see hd_split.h. */
enum hd_part { HD_RAIL, HD_NODE, HD_PARTS };

struct hd_comm {
    MPI_Comm mpi;
    int rank, size;
    char name[HD_NAME];
    uint64_t uid;       /* the same on all members */
    uint16_t rec_group; /* its number in the flight recorder */
    uint8_t as_world;   /* its ranks have the numbers that they have in the world */
    double timeout;     /* seconds */
    int check;          /* enum hd_check_level */
    int64_t chunk;      /* bytes of one piece of a long reduction */
    int tag_limit;      /* largest user tag */
    uint32_t seq;       /* collectives begun */
    uint32_t agreed;    /* atomic: the last collective that all ranks agreed on, so that all go
                         * on after it */
    /* Both atomic, and for tests alone. */
    uint32_t carried; /* collectives whose data travelled with the check */
    uint32_t packed;  /* lists that were reduced as one block */
    uint32_t mailed;  /* atomic: long messages sent */
    int64_t unread;   /* atomic: messages sent, less those received; the sum over all ranks
                       * is the number never received */
    hd_session *session;
    int *node_slot; /* slot of each member on this node's status page, -1: another node */
    int one_node;

    hd_page *page;        /* entry check through shared memory, or */
    struct hd_post *post; /* through MPI: see hd_post.h */
    size_t page_bytes;
    uint32_t check_seq; /* checks begun */
    uint32_t decided;   /* the last check that all ranks have joined */
    int freed;
    int closing;  /* atomic: an enum hd_closing */
    int replaced; /* atomic: closing, because the default group was reconfigured */
    int recalls;  /* atomic: the group is being destroyed: cancel receives whose message
                   * has not arrived */
    int inside;   /* atomic: callers that use the session or MPI; while there are any,
                   * neither is freed */

    hd_desk *desk;        /* of the roll calls for groups of its members; NULL: none yet */
    struct hd_late *late; /* atomic: how long this rank waited for each member: see hd_late.c */

    struct hd_node *node; /* memory that the ranks of a node share: see hd_node.c */
    int node_asked;       /* the members have tried to allocate it */
    int64_t node_limit;   /* bytes it may take */
    int two_level;        /* an enum hd_levels_setting, the same on all members */
    int ordered;          /* sums are the same wherever the members are: see hd_ordered.h */
    hd_split *split;      /* the members by nodes: their communicators */
    /* Of some of its members, revoked with `mpi`; MPI_COMM_NULL: none. Under the session's mu. */
    MPI_Comm parts[HD_PARTS];
    struct hd_levels *levels; /* their memory for that */
    int levels_asked;         /* the members have tried to allocate it */
    struct hd_block *blocks;  /* memory for tensors that the ranks of a node share: see hd_block.c;
                               * changed under mu by the thread that holds the lane */
    uint64_t block_ids;       /* given so far */
    int on_device;            /* tensors are device memory: MPI alone may touch them */

    char *staging; /* scaled or packed data, used by the thread that holds the lane */
    size_t staging_bytes;

    pthread_mutex_t
        mu; /* of the lane and its failure, `blocks`, `closing`, and all jobs' `state` */
    hd_lane lane;
    hd_failure failure;
    hd_transfer transfer;
    hd_comm *next; /* session's list */
    hd_vote vote;
    hd_grave grave;
};

/* Counts one more: on the thread that holds the lane. */
static inline void hd_count(uint32_t *n) { __atomic_store_n(n, *n + 1, __ATOMIC_RELAXED); }

#endif
