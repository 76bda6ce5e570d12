/* The engine's nouns: session, communicator, job. Life cycles:
 *
 *   session  one per init_process_group: status page of the node, watchdog. Counted by its communicators.
 *   comm     one per group: duplicated MPI communicator, entry-check page, lane (FIFO + thread).
 *   job      one per operation. Inline jobs live on the caller's stack; queued ones and point-to-point
 *            requests on the heap with two owners, the engine and the Python Work.
 */
#ifndef HD_ENGINE_H
#define HD_ENGINE_H

#include <mpi.h>
#include <pthread.h>
#include <stdint.h>

#include "hd_base.h"
#include "hd_buf.h"
#include "hd_types.h"

#define HD_TEXT 2048     /* bytes of an error text */
#define HD_SITE 192      /* bytes of "train.py:42 in step" */
#define HD_NAME 64       /* bytes of a group's name */
#define HD_TINY 64       /* bytes of a contribution that travels with the entry check */
#define HD_DEVICE_LEAST 4096 /* bytes: shorter messages of device memory go through the host */
#define HD_DESC 448      /* bytes of one rank's description of a call, as the others quote it */

enum hd_kind {
    HD_BARRIER = 0,
    HD_ALL_REDUCE,
    HD_REDUCE,
    HD_REDUCE_SCATTER,
    HD_BROADCAST,
    HD_ALL_GATHER,
    HD_GATHER,
    HD_SCATTER,
    HD_ALL_TO_ALL,
    HD_SEND,
    HD_RECV,
};

/* Messages of a layer above that no user's tensor can match, whatever its type and tag. */
enum hd_tag_kind { HD_ANNOUNCEMENT = 28, HD_PIECE = 29 };

enum hd_state { HD_QUEUED = 0, HD_RUNNING, HD_DONE };

typedef struct hd_seg {
    char *ptr;
    int64_t n;     /* elements */
    uint64_t form; /* shape and strides; 0: nothing there, matches everything */
    uint64_t strides;
} hd_seg;

typedef struct hd_comm hd_comm;
typedef struct hd_session hd_session;
/* Ranks that could not make a call, in order, and their common reason. */
#define HD_REFUSED_RANKS 16
typedef struct hd_refused {
    int n; /* all of them; the first ones are named */
    int ranks[HD_REFUSED_RANKS];
    char text[HD_DESC];
} hd_refused;
static inline void hd_refused_by(hd_refused *r, int rank)
{
    int at = r->n < HD_REFUSED_RANKS ? r->n : HD_REFUSED_RANKS - 1;
    if (r->n++ >= HD_REFUSED_RANKS && r->ranks[at] < rank)
        return;
    for (; at > 0 && r->ranks[at - 1] > rank; at--)
        r->ranks[at] = r->ranks[at - 1];
    r->ranks[at] = rank;
}

typedef struct hd_job hd_job;

struct hd_job {
    /* what to do */
    int kind;
    const char *api;      /* public name for messages; static storage */
    uint64_t api_hash;
    int dtype, redop, root;
    double factor;        /* PREMUL_SUM */
    int64_t count;        /* elements, for messages; must agree (unless pairwise) */
    int64_t extra;        /* part of the agreement: a list length, or the number of a backward
                           * pass */
    uint64_t layout;      /* part of the agreement: shape, strides, sizes of a list */
    int either;           /* some ranks may make this call asynchronously and others
                           * synchronously */
    int later;            /* part of the agreement: asynchronous, where all ranks must be */
    int pairwise;         /* counts may differ from rank to rank: verified pair by pair */
    int uneven;           /* this rank's own sizes differ from each other; after the check: some
                           * rank's do */
    int polls;            /* nonblocking MPI calls, polled: blocking and nonblocking ones do not
                           * match each other */
    int permuted;         /* dense but not C-contiguous: for messages */
    int listed;           /* in/out are lists of tensors, even of length one */
    int monitored;        /* a barrier that agrees even with the check off, and names all missing
                           * ranks on all ranks */
    int closing;          /* the last operation of the group: after it no rank reads what was
                           * sent */
    int nin, nout;
    hd_seg *in, *out;     /* point at in1/out1 or at allocated arrays */
    hd_seg in1, out1;
    char *apart;          /* where a result is made that would overwrite its own input, or NULL:
                           * malloc'ed */
    int ndim;
    int64_t dims[HD_MAX_DIMS];
    double timeout;       /* seconds */
    int64_t begun;        /* ns, when it was submitted; 0: it runs inline and has not waited yet */
    int inline_;          /* runs on the caller's thread: can check for signals and read the
                           * Python stack */
    int tiny;             /* bytes, if the entry check itself reduces them; else 0 */
    const char *own;      /* ... this rank's */
    uint64_t checksum;    /* check level full: of a result that must be the same on all ranks */
    const char *refusal;  /* why this rank cannot make the call: it only tells the others; or
                           * NULL */
    int refusal_code;     /* the error code of the others' calls; 0: HD_ERR_MISMATCH, it refused
                           * its own arguments */
    hd_refused *refused;  /* malloc'ed: why other ranks could not make the call, so that this one
                           * failed; or NULL */
    int owed;             /* a refusal that the others see only if the collective before this one
                           * was agreed on */
    char *cause;          /* malloc'ed: the failure of the earlier operation that it was queued
                           * behind; or NULL */
    /* point to point */
    int peer, tag;
    int tag_kind;         /* enum hd_tag_kind; 0: the tensor's element type keeps messages apart */
    MPI_Request req;
    MPI_Datatype big;     /* derived type of a message above 2^31-1 bytes, or MPI_DATATYPE_NULL */
    struct hd_envelope *envelope; /* Open MPI only: precedes a long message; see hd_envelope.c */
    MPI_Request envelope_req;
    int on_device;        /* the tensor is device memory, longer than HD_DEVICE_LEAST: MPI alone
                           * may touch it */
    char *spill;          /* receives a message that is longer than its tensor */
    int recalled;         /* MPI was asked to cancel the receive; 2: it has */
    int64_t got;          /* bytes received */
    int source;           /* the sender */
    int64_t posted;       /* ns */
    pthread_mutex_t mu;   /* guards req: MPI_Test by one thread at a time */
    /* the outcome */
    uint32_t seq;
    int state;            /* enum hd_state, atomic */
    int code;
    char *text;           /* error, malloc'ed */
    /* ownership */
    hd_comm *comm;
    int refs;             /* atomic: engine + Work */
    int watched;          /* a future waits for it */
    int seen;             /* its error was shown to the user */
    void *keep;           /* PyObject *: the tensors */
    hd_job *next;
    hd_job *ready;        /* queue of hd_notify.c */
    char site[HD_SITE];   /* the calling line, "" until needed; last, because hd_job_init leaves
                           * it as it is */
};

/* The memory that the members on one node share for the entry check: see hd_page.h. */
typedef struct hd_page hd_page;

struct hd_comm {
    MPI_Comm mpi;
    int rank, size;
    char name[HD_NAME];
    uint64_t uid;         /* the same on all members */
    double timeout;       /* seconds */
    int check;            /* 0 off, 1 on, 2 full */
    int64_t chunk;        /* bytes of one piece of a long reduction */
    int tag_limit;        /* largest user tag */
    uint32_t seq;         /* collectives begun */
    uint32_t agreed;      /* atomic: the last collective that all ranks agreed on, so that all go
                           * on after it */
    uint32_t mailed;      /* atomic: long messages sent */
    int64_t unread;       /* atomic: messages sent, less those received; the sum over all ranks
                           * is the number never received */
    hd_session *session;
    int *node_slot;       /* slot of each member on this node's status page, -1: another node */
    int one_node;

    hd_page *page;        /* entry check through shared memory, or */
    struct hd_post *post; /* through MPI: see hd_check_mpi.c */
    size_t page_bytes;
    uint32_t check_seq;   /* checks begun */
    uint32_t decided;     /* the last check that all ranks have joined */
    int freed;
    int closing;          /* atomic: 1 no new operations, 2 waiting callers leave with an error:
                           * the group is being destroyed */
    int recalls;          /* atomic: the group is being destroyed: cancel receives whose message
                           * has not arrived */
    int inside;           /* atomic: callers that use the session or MPI; while there are any,
                           * neither is freed */

    struct hd_node *node; /* memory for reductions that the ranks of a node share: see hd_node.c */
    int node_asked;       /* the members have tried to allocate it */
    int64_t node_limit;   /* bytes it may take */
    int on_device;        /* tensors are device memory: MPI alone may touch them */

    char *staging;        /* scaled or packed data, used by the thread that holds the lane */
    size_t staging_bytes;

    pthread_mutex_t mu;
    pthread_cond_t work_cv, done_cv;
    hd_job *head, *tail;
    int pending;          /* atomic: jobs submitted to the thread and not done */
    int busy;             /* atomic: an inline job runs */
    int stop, started;
    pthread_t thread;
    char *cause;          /* the first failure in the lane; operations queued behind it fail as
                           * well */
    int cause_code;
    uint32_t cause_upto;  /* operations that were begun before the program saw the failure ... */
    int cause_unseen;     /* ... which it has not yet */
    int given_up;         /* the program has given up what it had begun, up to this number: a
                           * failure of those counts as seen */
    uint32_t given_up_to;

    uint64_t data_phase;  /* atomic: odd while inside data transfer that cannot be cancelled */
    const char *cur_api;  /* for the watchdog's report; valid while data_phase is odd */
    uint32_t cur_seq;
    int64_t cur_until;    /* ns, its latest end; 0: cur_timeout from when the watchdog saw it */
    double cur_timeout;   /* the operation's own: the group's may have changed since */
    uint64_t wd_phase;    /* watchdog's memory */
    int64_t wd_since, wd_slept;

    hd_comm *next;        /* session's list */
};

/* ---- jobs ---- */
void hd_job_init(hd_job *j, hd_comm *c, int kind, const char *api);
void hd_fail(hd_job *j, int code, const char *fmt, ...) __attribute__((format(printf, 3, 4)));
/* rc other than MPI_SUCCESS -> HD_ERR_BACKEND with the MPI text. */
int hd_mpi_failed(hd_job *j, int rc, const char *call);
/* Frees what the job allocated, not the job. */
void hd_job_clear(hd_job *j);
void hd_job_describe(hd_text *t, const hd_job *j);      /* "all_reduce(float32[4, 3], op=SUM)" */
int hd_job_state(const hd_job *j);
void hd_job_finish(hd_job *j);                          /* publishes HD_DONE and wakes waiters */
void hd_job_unref(hd_job *j);                           /* by the engine, without the GIL */
/* The clock of a job runs from its submission. */
void hd_job_waiter(hd_waiter *w, int spin, hd_job *j); /* a wait under the job's deadline */
/* Seconds; 0: it runs inline and has not waited yet. */
double hd_job_elapsed(const hd_job *j);
/* The time by which its data must have moved: the deadline, or a few seconds from now if all ranks
 * have met just before it. */
int64_t hd_job_data_until(const hd_job *j, int64_t now);
/* Waits up to seconds for a queued job: 1 done, 0 not yet. */
int hd_job_wait(hd_job *j, double seconds);

/* Asks for a notification when j is done. 1: it will follow; 0: j is done already. */
int hd_job_watch(hd_job *j);
void hd_notify_push(hd_job *j);
hd_job *hd_notify_next(void);  /* blocks; NULL: stopped */
void hd_notify_stop(void);

/* Hooks into Python, set by _engine.pyx. */
typedef struct hd_hooks {
    void (*site)(hd_job *j);     /* inline job: take the GIL, note the calling line */
    int (*slow)(hd_job *j);      /* inline job waits: the same, and checks for signals; 1: a
                                  * handler raised */
    int (*alone)(void);          /* no other thread of this process can call an operation */
    void (*release)(hd_job *j);  /* the last owner is the engine: free with the GIL, later */
    void (*notify)(hd_job *j);   /* a watched job is done */
} hd_hooks;
extern hd_hooks hd_py;

/* ---- session ---- */
/* Collective over all ranks of a communicator; they have `timeout` seconds to arrive. */
int hd_session_open(MPI_Comm from, double timeout, hd_session **out, char *text, size_t room);
void hd_session_ref(hd_session *s);
void hd_session_unref(hd_session *s);
/* Identity of this node, and this rank's slot. */
uint64_t hd_session_node(const hd_session *s, int *slot);
/* Maps zeroed shared memory on all ranks of node, or on none. */
int hd_session_share(MPI_Comm node, size_t bytes, void **out);
void hd_session_adopt(hd_session *s, hd_comm *c);     /* the watchdog watches c from now on */
void hd_session_forget(hd_session *s, hd_comm *c);
int hd_session_serialized(const hd_session *s);
int hd_session_spin(const hd_session *s, int lane);
void hd_session_cpus(const hd_session *s, int *own, int *node);
void hd_session_progress(hd_session *s);              /* lets MPI move messages; cheap */
void hd_session_enter(hd_session *s, const hd_job *j);      /* the status page: this rank is in j */
void hd_session_leave(hd_session *s);
void hd_session_note(hd_session *s, const hd_job *j); /* with the calling line, on slow paths */
/* 0 running, 1 left in order, 2 died, 3 failed. */
int hd_session_gone(hd_session *s, int slot);
/* Inline: this rank cannot leave check n, unless it times out after `left` more seconds. */
void hd_session_blocked(hd_session *s, const hd_comm *c, uint32_t n, double left);
/* The check of another group that the rank in `slot` cannot leave because this rank has not come to
 * it, while this rank cannot leave its own: neither ever will. 0: there is none. *where: that
 * group. */
uint32_t hd_session_crossed(hd_session *s, const hd_comm *c, int slot, const char **where);
void hd_session_report(hd_session *s, int slot, hd_text *t); /* "in recv from rank 2 for 3.1 s at ..." */
/* Below MPI_THREAD_MULTIPLE: one thread at a time. */
void hd_mpi_lock(const hd_session *s);
void hd_mpi_unlock(const hd_session *s);
/* Notes that requests are left that no rank will match. */
void hd_session_poisoned(hd_session *s);
void hd_session_set_leaving(hd_session *s);
/* After an unhandled exception: the others see the reason. */
void hd_session_set_failing(hd_session *s, const char *why);
void hd_abort(int code, const char *why);
/* Where the reason goes besides stderr; -1: nowhere. */
void hd_abort_tell(int fd);
/* After an unhandled exception: ends the job even if the exit hangs. */
void hd_failing(double grace_s);
/* Installs the libc exit handler, which finalizes or aborts by exit status. */
void hd_arm_exit(int owns_mpi);
/* Waits until the launcher has read this process's output. */
void hd_until_read(void);
/* As hd_arm_exit(), for a rank that ends before MPI starts. */
void hd_arm_early(void);
/* 1: the launcher was asked to end the job; see hd_early.c. */
int hd_end_job_early(int status);
/* Ends this process if it waits, at its end, for a dead one. */
void hd_exit_watch(void);
/* From now on a thread answers MPI's requests on fd. */
int hd_pmi_answer(int fd);
int hd_pmi_active(void);                              /* 1 after that: the job has no launcher */
void hd_pmi_relay_begin(void);                         /* around MPI_Init: see hd_pmi_relay.c */
void hd_pmi_relay_end(void);
int hd_in_child(void);                                /* 1 in a process forked after MPI started */

/* ---- communicators ---- */
int hd_comm_open(MPI_Comm from, hd_session *s, int dup, const char *name, double timeout, int check,
                 hd_comm **out, char *text, size_t room);
int hd_comm_create_group(hd_comm *parent, const int *ranks, int n, int tag, const char *name,
                         double timeout, hd_comm **out, char *text, size_t room);
void hd_comm_release(hd_comm *c);            /* the last Python owner has gone */
/* The communicator itself is kept, unless all ranks are here and no message is left: MPI would give
 * its number to the next communicator, and with it the messages that are still on their way. */
int hd_comm_free(hd_comm *c, int drained, int together);
/* 1: nothing is in flight; 0 also if MPI is not up. */
int hd_comm_drain(hd_comm *c, double seconds);
int64_t hd_comm_unread(hd_comm *c); /* of this rank: see hd_comm.unread */

/* Brackets every use of a group's session or MPI outside its lane. 0: the group is being destroyed,
 * and must not be used. The counter goes up first: hd_comm_free sets `closing` and then waits for
 * it. */
extern int hd_callers; /* atomic: of all groups */
static inline void hd_comm_exit(hd_comm *c)
{
    __atomic_sub_fetch(&c->inside, 1, __ATOMIC_SEQ_CST);
    __atomic_sub_fetch(&hd_callers, 1, __ATOMIC_SEQ_CST);
}
static inline int hd_comm_enter(hd_comm *c, int begins)
{
    __atomic_add_fetch(&hd_callers, 1, __ATOMIC_SEQ_CST);
    __atomic_add_fetch(&c->inside, 1, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&c->closing, __ATOMIC_SEQ_CST) < (begins ? 1 : 2))
        return 1;
    hd_comm_exit(c);
    return 0;
}
void hd_comm_close(hd_comm *c, int how);     /* sets `closing` */

/* ---- the entry check ---- */
size_t hd_page_size(int nranks);
/* Waits some seconds for all members to free the group. 1: they do, and no message is left; -1: a
 * signal handler raised. */
int hd_page_leave(hd_comm *c, double seconds);
/* Collective over the group; leaves page NULL if it cannot be made. */
int hd_page_open(hd_comm *c);
void hd_page_close(hd_comm *c);
int hd_post_open(hd_comm *c);                /* collective over the group */
int hd_post_close(hd_comm *c, int together); /* 0: requests are left that no rank matched */
int64_t hd_post_unread(hd_comm *c);
int hd_check_mpi(hd_comm *c, hd_job *j, uint64_t fingerprint);
/* Agrees on the call. HD_OK, or an error code with j->text. j->uneven becomes true if the counts of
 * any rank differ (verify pair by pair), and j->polls if any rank has to poll. */
int hd_check(hd_comm *c, hd_job *j, uint64_t fingerprint);

/* ---- memory for reductions within a node ---- */
void hd_node_close(hd_comm *c);
int64_t hd_node_bytes(const hd_comm *c);     /* 0: there is none */

/* ---- what its errors say ---- */
void hd_note_site(hd_job *j);                               /* the calling line, if available */
void hd_say_call(hd_text *t, const hd_comm *c, const hd_job *j);
/* "ranks 1, 2 refused their arguments: why"; also noted in the job, for later use. The ranks'
 * reasons are equal. */
void hd_say_refused(hd_text *t, hd_job *j, int code, const hd_refused *by);
void hd_describe_here(char *out, hd_job *j);                /* into HD_DESC bytes */
/* Adds to such a description the ranks that have not come. */
void hd_say_awaited(char *here, const hd_comm *c, int (*came)(const void *of, int rank), const void *of);
/* One text per rank. */
int hd_fail_mismatch(hd_comm *c, hd_job *j, const char *texts, size_t stride);
int hd_fail_gone(hd_comm *c, hd_job *j, int rank, int how); /* how: as for hd_session_gone */
/* The first member that has gone, if any. */
int hd_fail_if_gone(hd_comm *c, hd_job *j);

/* ---- tensors of one call that share memory ---- */
/* Whether two segments of a list overlap, and which; -1: no memory to find out. */
int hd_overlap(const hd_seg *list, int n, int64_t item, int *one, int *other);
/* The output that input i may lie in: first + i * step; with `exact` it must begin where that
 * output begins. */
typedef struct hd_own {
    int first, step, exact;
} hd_own;
/* Whether an input lies in an output that is not its own, and which; the outputs do not overlap. -1
 * as above. */
int hd_input_in_output(const hd_seg *in, int nin, const hd_seg *out, int nout, int64_t item, hd_own own, int *one,
                       int *other);
/* Memory for a reduce_scatter whose output lies in its input: HD_OK, or HD_ERR_MEMORY. Call it
 * before the ranks agree. */
int hd_keep_apart(const hd_comm *c, hd_job *j);

/* ---- running a job ---- */
void hd_exec(hd_comm *c, hd_job *j);         /* check + data; fills code and text */
/* Brackets the phase that all ranks have agreed to and that cannot be cancelled: the watchdog ends
 * the job if it takes too long. */
void hd_data_begin(hd_comm *c, const hd_job *j);
void hd_data_end(hd_comm *c);
/* What the entry check compares beside the fingerprint: the count, and for pairwise calls also
 * shape and strides. */
int64_t hd_agreed(const hd_job *j);
int hd_verify_pairs(hd_comm *c, hd_job *j);  /* uneven counts: what I send is what you expect */
int hd_poll(hd_comm *c, hd_job *j, MPI_Request *req);
int hd_wait_all(hd_comm *c, hd_job *j, int n, MPI_Request *reqs);
MPI_Datatype hd_big_type(int64_t bytes);     /* a committed type of that many bytes */

/* ---- the lane ---- */
int hd_lane_try(hd_comm *c);                 /* 1: the lane was empty and is now the caller's */
void hd_lane_leave(hd_comm *c);              /* gives it back without having run anything */
void hd_lane_run(hd_comm *c, hd_job *j);     /* on a lane taken by hd_lane_try; gives it back */
/* Queues j for the lane's thread; errno-like; -1: the group is being destroyed. */
int hd_lane_submit(hd_comm *c, hd_job *j);
/* Operations in flight may fail unseen: those begun from now on may run. */
void hd_lane_give_up(hd_comm *c);
/* The program has seen a failure: operations begun from now on may run. */
void hd_lane_seen(hd_comm *c);
int hd_lane_drain(hd_comm *c, double seconds); /* 1 empty, 0 not */
void hd_lane_close(hd_comm *c);
extern int hd_lanes_busy;                    /* atomic: threads of lanes that run a job */

/* ---- point to point ---- */
/* MPI may still touch the tensor of a job that has ended. */
int hd_p2p_unfinished(const hd_job *j);
int hd_p2p_start(hd_comm *c, hd_job *j);     /* posts; may finish at once */
int hd_p2p_test(hd_job *j);                  /* 1 done */
/* Waits; HD_OK, an error code, or -1 when `seconds` passed first (the job lives on). */
int hd_p2p_wait(hd_job *j, double seconds, int interruptible);
void hd_p2p_watch(hd_job *j);                /* leaves it to the poller thread */
/* Cancels a receive. 1: cancelled; 0: it has ended, mostly well, because its message had arrived;
 * -1: its message is on its way, call again. The call takes up to `seconds`. */
int hd_p2p_take_back(hd_job *j, double seconds);
/* Ends the job, not the request: MPI may use the tensor for ever. */
void hd_p2p_give_up(hd_job *j);
int hd_p2p_drain(hd_comm *c, double seconds); /* no request of c (NULL: of any) is left; 1 yes */
/* Cancels the receives of c whose messages have not arrived, if no send is in flight. Does not
 * wait. */
void hd_p2p_recall(hd_comm *c);
/* Cancels all receives of c and gives up its sends; 1: MPI is done with all of them. */
int hd_p2p_close(hd_comm *c);
int hd_p2p_shutdown(void);                   /* the poller has left MPI for ever; 1: it has */

#endif
