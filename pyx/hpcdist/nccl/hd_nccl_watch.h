/* Operations in flight, and the watchdog: one C thread that never takes the GIL. It checks the
 * operations in flight and NCCL's own reports, and has a communicator aborted whose operation is
 * late or has failed, so that no thread waits for it for ever. */
#ifndef HD_NCCL_WATCH_H
#define HD_NCCL_WATCH_H

#include <stdint.h>

#include "hd_nccl_guard.h"

enum { HD_WATCH_RUNS = 0, HD_WATCH_DONE = 1, HD_WATCH_FAILED = 2, HD_WATCH_CAPTURED = 3 };

/* The functions needed from CUDA, by address: those of the driver, or a test's. 0 is success;
 * streams, events and contexts are pointers. The last three may be NULL, where there are no
 * contexts and no graphs. */
typedef struct {
    int (*create)(void **event, unsigned flags);            /* cuEventCreate */
    int (*record)(void *event, void *stream);               /* cuEventRecord */
    int (*query)(void *event);                              /* cuEventQuery */
    int (*wait)(void *stream, void *event, unsigned flags); /* cuStreamWaitEvent */
    int (*captures)(void *stream, int *status);             /* cuStreamIsCapturing */
    int (*mode)(int *mode);                                 /* cuThreadExchangeStreamCaptureMode */
    int (*context)(void **context);                         /* cuCtxGetCurrent */
    int (*enter)(void *context);                            /* cuCtxSetCurrent */
} hd_cuda;

enum { HD_CUDA_NOT_READY = 600 };

/* One device. It keeps its events for the next operation. */
typedef struct hd_gpu {
    struct hd_gpu *next;
    hd_cuda cuda;
    void *context; /* the device's context, which torch uses */
    int index;
    struct hd_watched *spare;
} hd_gpu;

/* One operation. Its owners: the watchdog while it is `listed`, the group's queue, and a handle. */
typedef struct hd_watched {
    struct hd_watched *next;  /* in the watchdog's list, or among the spare ones */
    struct hd_watched *after; /* in the group's queue */
    hd_gpu *gpu;
    hd_guard *guard;
    void *event;     /* reached when the operation is done */
    const char *api; /* static storage */
    uint64_t number;
    int64_t deadline;        /* atomic: ns, monotonic */
    double limit;            /* seconds it had, for the message */
    void *keep;              /* for the owner of the queue */
    uint64_t record;         /* atomic: the number of its first record; 0: none, or it has ended */
    uint32_t records;        /* of messages that start together: how many */
    int other_stream;        /* on a stream other than the caller's */
    int starting;            /* atomic: NCCL's call has not returned, and the event says nothing */
    int refs, state, listed; /* atomic */
} hd_watched;

/* The device of an index, the same one for the same functions; NULL if out of memory. */
hd_gpu *hd_gpu_of(const hd_cuda *cuda, void *context, int index);

/* An operation that is to be enqueued on `stream`. If `stream` is not `current`, the operation runs
 * after all that is in `current` now. *made is the operation; its state is HD_WATCH_CAPTURED if the
 * stream is being captured into a graph. Returns 0, or CUDA's error and in *call the function that
 * returned it; HD_START_ for errors of our own. */
enum { HD_START_MEMORY = -1, HD_START_OTHER_CAPTURES = -2 };
int hd_start(hd_gpu *gpu, hd_guard *guard, void *current, void *stream, hd_watched **made,
             const char **call);
/* Before a call of NCCL that may wait for other ranks: the operation is watched from now on, unless
 * it is captured. */
void hd_starting(hd_watched *w, double seconds);
/* The operation has been enqueued: from now on it is watched, unless it is captured. Returns as
 * hd_start does. */
int hd_started(hd_watched *w, void *stream, double seconds, const char **call);
/* Makes `stream` wait for it. */
int hd_order(hd_watched *w, void *stream);
/* Whether a stream is being captured; also not 0 if CUDA reports an error. */
int hd_captures(hd_gpu *gpu, void *stream);
/* "all_reduce #3 of the group 'world' on rank 0" */
void hd_watched_name(const hd_watched *w, char *text, size_t size);
/* Notes in the flight recorder that it has ended. */
void hd_watched_end(hd_watched *w, int state);
/* Adds to a text what all ranks called in its place. */
void hd_watched_explain(const hd_watched *w, char *text, size_t size);
/* Checks the event for at most `seconds`; returns the state. */
int hd_watch_wait(hd_watched *w, double seconds);
void hd_watch_put(hd_watched *w);
/* Drops an operation that was not enqueued. */
void hd_watch_drop(hd_watched *w);
static inline void hd_watch_take(hd_watched *w)
{
    __atomic_add_fetch(&w->refs, 1, __ATOMIC_ACQ_REL);
}
static inline int hd_watch_listed(hd_watched *w)
{
    return __atomic_load_n(&w->listed, __ATOMIC_ACQUIRE);
}
/* Notices forks from now on. Returns 1 in a forked child: its memory says what the parent did, and
 * it has no watchdog. */
int hd_watch_forks(void);
int hd_watch_forked(void);
/* At the end of the process: checks nothing any more, because the events are freed. */
void hd_watch_stop(void);

#endif
