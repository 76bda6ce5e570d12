/* A job: one operation of one group, and what has become of it. Inline jobs lie on the caller's
 * stack, or, if they are messages, on the heap; queued ones and point-to-point requests on the heap
 * with two owners, the engine and the Python Work. */
#ifndef HD_JOB_H
#define HD_JOB_H

#include <mpi.h>
#include <pthread.h>
#include <stdint.h>

#include "hd_base.h"
#include "hd_buf.h"
#include "hd_comm.h"
#include "hd_kinds.h"

#define HD_SITE 192          /* bytes of "train.py:42 in step" */
#define HD_DESC 448          /* bytes of one rank's description of a call, as the others quote it */
#define HD_DEVICE_LEAST 4096 /* bytes: shorter messages of device memory go through the host */

/* Messages of a layer above that no user's tensor can match, whatever its type and tag. */
enum hd_tag_kind {
    HD_WINDOW_REQUEST = 22, /* hd_window.h, also the next three */
    HD_WINDOW_BRINGS = 23,
    HD_WINDOW_FETCHES = 24,
    HD_WINDOW_ANSWER = 25,
    HD_OBJECTS = 26,
    HD_SIGNAL = 27,
    HD_ANNOUNCEMENT = 28,
    HD_PIECE = 29
};

enum hd_state { HD_QUEUED = 0, HD_RUNNING, HD_DONE };
enum hd_watch { HD_UNWATCHED = 0, HD_WATCHED, HD_WATCH_OVER };

typedef struct hd_seg {
    char *ptr;
    int64_t n;     /* elements */
    uint64_t form; /* shape and strides; 0: nothing there, matches everything */
} hd_seg;

/* Ranks that could not make a call, in order, and their common reason. */
#define HD_REFUSED_RANKS 16
typedef struct hd_refused {
    int n; /* all of them; the first ones are named */
    int ranks[HD_REFUSED_RANKS];
    char text[HD_DESC];
} hd_refused;

/* Adds a rank. */
static inline void hd_refused_by(hd_refused *r, int rank)
{
    int at = r->n < HD_REFUSED_RANKS ? r->n : HD_REFUSED_RANKS - 1;
    if (r->n++ >= HD_REFUSED_RANKS && r->ranks[at] < rank)
        return;
    for (; at > 0 && r->ranks[at - 1] > rank; at--)
        r->ranks[at] = r->ranks[at - 1];
    r->ranks[at] = rank;
}

/* What the entry check has found. */
typedef struct hd_checked {
    const struct hd_carry *carry; /* how the check moves the data, if it can; see hd_carry.h */
    int carried;                  /* it has */
    int verified;                 /* sizes that differ fit, pair by pair; and then: */
    int64_t longest;              /* elements of the longest block */
    int64_t total;                /* and of all blocks */
    int compares;      /* check level full: the data has moved, and the results are compared */
    uint64_t checksum; /* and this rank's */
} hd_checked;

/* A call that this rank cannot make, so that it only tells the others. */
typedef struct hd_refusal {
    const char *why; /* NULL: it can */
    int code;        /* the error code of the others' calls; 0: HD_ERR_MISMATCH, it refused its own
                      * arguments */
    int if_agreed;   /* the others see it only if collective `after` was the last that all ranks
                      * agreed on */
    uint32_t after;
} hd_refusal;

/* A send or a receive. */
typedef struct hd_message {
    int peer, tag;
    int tag_kind; /* enum hd_tag_kind; 0: the tensor's element type keeps messages apart */
    MPI_Request req;
    MPI_Datatype big; /* derived type of a message above 2^31-1 bytes, or MPI_DATATYPE_NULL */
    struct hd_envelope *envelope; /* Open MPI only: precedes a long message; see hd_envelope.c */
    MPI_Request envelope_req;
    int on_device;  /* the tensor is device memory, longer than HD_DEVICE_LEAST: MPI alone may touch
                     * it */
    char *overflow; /* receives a message that is longer than its tensor */
    int recalled;   /* MPI was asked to cancel the receive; 2: it has */
    int64_t got;    /* bytes received */
    int source;     /* the sender */
    int64_t nan; /* of a send: 1 + the index of its first NaN; 0: none was looked for, or found */
    int64_t posted;     /* ns, atomic; 0: it was done too soon to look at a clock */
    int64_t left;       /* ns: when its peer was first seen to have left the group; 0: it has not */
    pthread_mutex_t mu; /* guards req: MPI_Test by one thread at a time */
} hd_message;

struct hd_job {
    /* what to do */
    int kind;
    const char *api; /* public name for messages; static storage */
    uint64_t api_hash;
    uint64_t rec;     /* its record's number in the flight recorder; 0: none, or it has ended */
    uint32_t site_id; /* the flight recorder's number of the calling line, and of `api` */
    uint16_t name_id;
    int dtype, redop, root;
    double factor;        /* PREMUL_SUM */
    int64_t count;        /* elements, for messages; must agree (unless pairwise) */
    int64_t extra;        /* part of the agreement: a list length, or what `extra_is` says */
    const char *extra_is; /* for messages; NULL, or static storage */
    uint64_t layout;      /* part of the agreement: shape, strides, sizes of a list */
    int async_may_differ; /* some ranks may make this call asynchronously and others
                           * synchronously */
    int all_async;        /* part of the agreement: asynchronous, where all ranks must be */
    int pairwise;         /* counts may differ from rank to rank: verified pair by pair */
    int uneven;           /* this rank's own sizes differ from each other; after the check: some
                           * rank's do */
    int direct;           /* this rank's tensors lie in blocks; after the check: all ranks' do, see
                           * hd_direct.h */
    int polls;            /* nonblocking MPI calls, polled: blocking and nonblocking ones do not
                           * match each other */
    int permuted;         /* dense but not C-contiguous: for messages */
    int listed;           /* in/out are lists of tensors, even of length one */
    int monitored;        /* a barrier that agrees even with the check off, and names all missing
                           * ranks on all ranks */
    int closing;          /* the last operation of the group: after it no rank reads what was
                           * sent */
    int nin, nout;
    hd_seg *in, *out; /* point at in1/out1 or at allocated arrays. An all_reduce without inputs
                       * reads its outputs. */
    hd_seg in1, out1;
    struct hd_block **new_block; /* a barrier that makes memory for tensors puts the block there */
    char *scratch; /* where a result is made that would overwrite its own input, or NULL:
                    * malloc'ed */
    int ndim;
    int64_t dims[HD_MAX_DIMS];
    double timeout;     /* seconds */
    int64_t begun;      /* ns, when it was submitted; 0: it runs inline and has not waited yet */
    int64_t data_until; /* ns: its tensors' data must have moved by then; 0: not known yet */
    int inline_;        /* runs on the caller's thread: can check for signals and read the
                         * Python stack */
    int unwanted;       /* atomic: a signal handler raised in the thread that waits for this job,
                         * which the lane runs */
    hd_checked checked;
    hd_refusal refusal;
    hd_refused *refused; /* malloc'ed: why other ranks could not make the call, so that this one
                          * failed; or NULL */
    char *cause;         /* malloc'ed: the failure of the earlier operation that it was queued
                          * behind; or NULL */
    hd_message message;
    /* the outcome */
    uint32_t seq;
    int state; /* enum hd_state, atomic */
    int code;
    char *text; /* error, malloc'ed */
    /* ownership */
    hd_comm *comm;
    int refs;    /* atomic: engine + Work */
    int watched; /* enum hd_watch, atomic: a future waits for it */
    int seen;    /* its error was shown to the user */
    void *keep;  /* PyObject *: the tensors */
    void *group; /* PyObject *: the Comm */
    hd_job *next;
    hd_job **at;   /* in the poller's inbox: what points at it; or NULL */
    hd_job *ready; /* queue of hd_notify.c */
    /* from here on hd_job_init leaves everything as it is */
    char site[HD_SITE];       /* the calling line, "" until needed */
    struct hd_envelope *room; /* of a message: memory for its envelope, kept for the next one; or
                               * NULL */
};

/* What a rank that disagrees tells the others of its call; the bytes travel as they are. */
typedef struct hd_description {
    char text[HD_DESC];
    uint8_t closing; /* it has come to destroy the group, which it does whatever the others do */
    uint8_t unused[7];
} hd_description;

const char *hd_kind_name(int kind); /* "?" for none of enum hd_kind */
void hd_job_init(hd_job *j, hd_comm *c, int kind, const char *api);
void hd_fail(hd_job *j, int code, const char *fmt, ...) __attribute__((format(printf, 3, 4)));
/* rc other than MPI_SUCCESS -> HD_ERR_BACKEND with the MPI text. */
int hd_mpi_failed(hd_job *j, int rc, const char *call);
/* Frees what the job allocated, not the job. */
void hd_job_clear(hd_job *j);
void hd_job_describe(hd_text *t, const hd_job *j); /* "all_reduce(float32[4, 3], op=SUM)" */
int hd_job_state(const hd_job *j);
void hd_job_finish(hd_job *j); /* publishes HD_DONE and wakes waiters */
void hd_job_unref(hd_job *j);  /* by the engine, without the GIL */
/* The clock of a job runs from its submission. */
void hd_job_waiter(hd_waiter *w, int spin, hd_job *j); /* a wait under the job's deadline */
/* Seconds; 0: it runs inline and has not waited yet. */
double hd_job_elapsed(const hd_job *j);
/* The time by which its data must have moved: the deadline, or a few seconds from now if all ranks
 * have met just before it. */
int64_t hd_job_data_until(const hd_job *j, int64_t now);

/* When its deadline counts from, if there is at least as much time from `now` on as for data. */
int64_t hd_job_begun_again(const hd_job *j, int64_t now);
/* Waits up to seconds for a queued job: 1 done, 0 not yet. */
int hd_job_wait(hd_job *j, double seconds);

/* Hooks into Python, set by _engine.pyx. */
typedef struct hd_hooks {
    void (*site)(hd_job *j);    /* inline job: take the GIL, note the calling line */
    int (*slow)(hd_job *j);     /* inline job waits: the same, and checks for signals; 1: a
                                 * handler raised */
    int (*alone)(void);         /* no other thread of this process can call an operation */
    void (*release)(hd_job *j); /* the last owner is the engine: free with the GIL, later */
    void (*notify)(hd_job *j);  /* a watched job is done */
    int (*several)(void);       /* whether other threads could call an operation */
} hd_hooks;
extern hd_hooks hd_py;

/* atomic: the program finalizes MPI, and lanes no longer wait for ranks that have not arrived */
extern int hd_lanes_end;
static inline int hd_job_ends(const hd_job *j)
{
    return !j->inline_ && __atomic_load_n(&hd_lanes_end, __ATOMIC_ACQUIRE);
}

/* Whether a signal handler has raised in the call. The thread of a lane hears of it from the thread
 * that waits. */
static inline int hd_job_interrupted(hd_job *j)
{
    if (!j->inline_)
        return __atomic_load_n(&j->unwanted, __ATOMIC_ACQUIRE);
    return hd_py.slow && hd_py.slow(j);
}

#endif
