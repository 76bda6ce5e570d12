/* A stand-in for libnccl.so.2: NCCL's functions over host memory, between the processes of one machine. Also streams
 * and events, each stream a thread with a queue, so that a missing wait shows. For tests; see README.md. */
#ifndef STANDIN_H
#define STANDIN_H

#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#define PUBLIC __attribute__((visibility("default")))

enum { OK, CUDA, SYSTEM, INTERNAL, ARGUMENT, USAGE, REMOTE, IN_PROGRESS };
enum { INT8, UINT8, INT32, UINT32, INT64, UINT64, FLOAT16, FLOAT32, FLOAT64, BFLOAT16, FLOAT8_E4M3, FLOAT8_E5M2, TYPES };
enum { SUM, PROD, MAX, MIN, AVG, OPS };
enum { ALL_REDUCE = 1, REDUCE, BROADCAST, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, GATHER, SCATTER, SEND, RECV };

#define RANKS 16
#define CHUNK 65536   /* bytes of a rank's part in a step */
#define MESSAGE 65536 /* bytes of a message between two ranks in a step */
#define CREATED 4096  /* PREMUL_SUM operations of a communicator */

/* --- element types (standin_types.c) --- */
size_t type_size(int type);
/* acc[i] = acc[i] op in[i], or acc[i] = in[i] where first; factor multiplies in, for PREMUL_SUM. acc is of values
 * wide enough to be rounded once, by finish. */
typedef union {
    double d;
    int64_t i;
    uint64_t u;
} wide;
void accumulate(wide *acc, const void *in, size_t n, int type, int op, int first, double factor);
void finish(void *out, const wide *acc, size_t n, int type, int divide_by);
double scalar_value(const void *scalar, int type);

/* --- streams and events (standin_stream.c) --- */
typedef void (*task_fn)(void *);
typedef void *(*copy_fn)(void *); /* of a task's argument, for each replay of a graph */
void stream_push(void *stream, task_fn run, void *arg, copy_fn copy);
int stream_captures(void *stream);
int capture_refuses(void);
int standin_event_create(void **made, unsigned flags);
int standin_event_record(void *event, void *stream);
int standin_stream_wait_event(void *stream, void *event, unsigned flags);
void standin_event_destroy(void *event);
int64_t nanoseconds(void);
void nap(int64_t ns);

/* --- communicators (standin_comm.c) --- */
typedef struct {
    int32_t kind, type, op, root;
    uint64_t count;
} about; /* what ranks must agree on */

typedef struct {
    _Atomic uint64_t phase;   /* steps of collectives that this rank has reached */
    _Atomic uint64_t control; /* the same for split */
    _Atomic int pid;
    _Atomic int left;
    int version, color, key;
    char bus[32];
    about call;
    char data[CHUNK];
} place;

typedef struct {
    _Atomic uint64_t written, taken;
    uint64_t total;
    int32_t type, bytes;
    char data[MESSAGE];
} mailbox;

typedef struct {
    _Atomic int joined;
    _Atomic int failed;
    int size;
    place at[RANKS];
    mailbox box[RANKS][RANKS]; /* from, to */
} shared;

typedef struct ncclComm {
    _Atomic int refs, stop, async, busy; /* busy: operations on streams */
    _Atomic int inside;                  /* operations that read and write their tensors */
    _Atomic int calls, freed;            /* calls that are inside; whether it has been destroyed or aborted */
    _Atomic int blocked;                 /* a call waits for the abort */
    int rank, size, blocking, children;
    uint64_t control, number, launched;
    _Atomic uint64_t ran; /* of what was launched, in that order, whatever its streams */
    char name[96];
    char error[256];
    shared *mem;
    double factor[CREATED];
    int factor_type[CREATED];
    int nfactors;
} comm;

typedef struct op {
    comm *comm;
    about call;
    const char *send;
    char *recv;
    double factor;
    int peer, fault;
    double seconds;
    uint64_t done, number, turn;
    struct op *next;
} op;

comm *comm_new(const char *name, int size, int rank, int blocking);
int comm_join(comm *c); /* waits for all */
int comm_control(comm *c, int color, int key); /* publishes, waits for all; call comm_control_done after reading */
int comm_control_done(comm *c);
void comm_put(comm *c);
void comm_busy(comm *c, int by); /* operations on streams come and go */
int comm_others_busy(comm *c);   /* those of this process's other communicators */
int comm_hold(comm *c); /* before an operation touches tensors: -1 where it must not any more */
void comm_release(comm *c);
void comm_stop(comm *c); /* from now on none does */
void comm_fail(comm *c, int code, const char *text, ...);
int comm_lost(comm *c);           /* aborted or failed on this rank: nothing more will come of it */
int comm_gone(comm *c, int rank); /* another rank has left or died */
int comm_wait(comm *c, _Atomic uint64_t *word, uint64_t until, int peer);

/* --- data (standin_data.c) --- */
void run_ops(op *list); /* of one group, on one stream */

#endif
