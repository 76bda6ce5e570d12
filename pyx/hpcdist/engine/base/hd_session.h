/* A session, one per init_process_group: the control communicator, the status page of the node, the
 * watchdog. Its communicators count it. Files outside the session's own use hd_status.h,
 * hd_threads.h and hd_session_life.h. */
#ifndef HD_SESSION_H
#define HD_SESSION_H

#include <mpi.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

#include "hd_accord.h"
#include "hd_base.h"
#include "hd_comm.h"

enum { RUNNING = 1, LEAVING = 2, FAILING = 3, ABORTED = 4 }; /* ABORTED: without a launcher only */

#define HD_HELD 3 /* connections of a neighbour: to the launcher, stdout, stderr */

/* A rank that calls reconfigure knows of a death; or of none, and waits for the others; or of none,
 * and has broken the session. */
enum { HD_DEATH = 1, HD_NO_DEATH = 2, HD_BROKE = 3 };

/* UNSEEN: another pid namespace, its pids are not valid here. */
enum { NO_PIDFD = -1, UNSEEN = -2 };

/* What one rank shows the other ranks of its node. All fields but `why` may be written while others
 * read them. */
typedef struct entry {
    uint32_t state, pid, world_rank, seq, kind;
    uint64_t phase;      /* odd: inside an operation */
    int64_t beat, since; /* ns; since: when the watchdog first saw this phase */
    uint64_t since_phase, text_phase;
    char text[2][192] __attribute__((aligned(8))); /* the call it is in (slow paths only) */
    char why[448];                                 /* of FAILING */
    uint64_t blocked_phase, blocked_group;         /* in this phase it waits in this group ... */
    /* ... in this check, and can make no other call meanwhile. */
    uint32_t blocked_check;
    int64_t reported;         /* ns; of slot 0: when a rank of the node last wrote a hang report */
    int64_t starved;          /* ns: so long its thread waited for a core in this phase */
    int warned;               /* of slot 0: a rank of the node has named one that is late */
    char record[HD_REC_PATH]; /* the file of its flight recorder */
    uint32_t recovers;        /* it is in hd_comm_recover(): one of the above; or 0 */
    uint32_t makes;           /* its threads that make groups: see hd_making.h */
    uint32_t finalizes;       /* it has begun MPI_Finalize */
    uint32_t given_up;        /* it was stopped for too long, and is ended: see hd_stopped.h */
} __attribute__((aligned(HD_LINE))) entry;

struct hd_session {
    MPI_Comm ctl;
    int rank, size;
    int active;    /* the first so many ranks are the default group's; the others are spares */
    int machine_n; /* more than node_n where HPCDIST_NODES divides a machine */
    int node_n, slot;
    uint64_t node;
    entry *page;
    size_t page_bytes;
    int spin, lane_spin, serialized, own_cpus, node_cpus;
    int refs;
    int *pidfd;
    int *dead;        /* by slot, set by the watchdog */
    int64_t *stopped; /* atomic, by slot, ns: since when; 0: it is not. See hd_stopped.h */
    int ended;        /* atomic: so many ranks of this node were ended because of that */
    int64_t patient;  /* atomic, ns: until then their deaths become known */
    pthread_t watchdog;
    int watching, stop;
    int wake[2];
    int held[HD_HELD];  /* copies of the neighbour's connections to the launcher: see
                         * hd_hydra.c; or -1 */
    pthread_mutex_t mu; /* comms */
    hd_comm *comms;
    pthread_mutex_t mpi_mu;
    const char *last_api;
    uint32_t last_seq;
    int last_tid;         /* atomic: the thread that began it */
    hd_starving starving; /* the watchdog's memory of that */
    int64_t window;       /* ns: since when the watchdog counts how long this rank waited */
    int ft;               /* it goes on without a rank that dies: see hd_ft.h */
    int broken;           /* atomic: a rank has died; all operations fail */
    int uncommitted;      /* atomic: the death of a spare does not break it: see hd_spares.h */
    uint8_t *lost;        /* atomic, by rank */
    int64_t rebuilt_by; /* atomic, ns: until then the ranks that are left make a new session; -1: it
                         * is made; 0: they do not */
    int remade;         /* of the ranks that a death has left */
    int settled;        /* atomic: all ranks that are left have met; `lost` is complete */
    entry alone;        /* in place of this rank's in the page, where there is none */
    hd_accord met;      /* with which a recovery begins, or a farewell: see hd_spares.h */
    int parted;         /* this rank has begun its farewell */
};

#endif
