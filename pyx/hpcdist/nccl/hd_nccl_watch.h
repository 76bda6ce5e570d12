/* The watchdog: one C thread that never takes the GIL. It looks at the operations in flight and at NCCL's own reports,
 * and aborts a communicator whose operation is late or has failed, so that nobody waits for it for ever. */
#ifndef HD_NCCL_WATCH_H
#define HD_NCCL_WATCH_H

#include <stdint.h>

#include "hd_nccl.h"

/* One communicator. Whoever sets `taken` may abort or destroy it, once. */
typedef struct {
    const hd_nccl *nccl;
    ncclComm_t comm;
    int refs;   /* atomic */
    int inside; /* atomic: calls of this process that are in NCCL right now */
    int taken;  /* atomic */
    int failed; /* atomic: 0, else an HD_NCCL_ code; HD_WATCH_LATE for an operation past its time */
    int told;   /* an exception has been made of it; by threads that hold the GIL */
    char what[160]; /* the operation that was in flight */
    char text[512];
} hd_guard;

enum { HD_WATCH_LATE = -1, HD_WATCH_CUDA = -2 };
enum { HD_WATCH_RUNS = 0, HD_WATCH_DONE = 1, HD_WATCH_FAILED = 2 };

/* 0: reached; HD_WATCH_NOT_READY: not yet; anything else is an error. As cuEventQuery. */
typedef int (*hd_query)(void *event);
enum { HD_WATCH_NOT_READY = 600 };

typedef struct hd_watched {
    struct hd_watched *next;
    hd_guard *guard;
    void *event;
    hd_query query;
    int64_t deadline; /* ns, monotonic */
    double limit;     /* seconds it had, for the message */
    int refs, state;  /* atomic */
    char what[160];
} hd_watched;

hd_guard *hd_guard_new(const hd_nccl *nccl, ncclComm_t comm);
void hd_guard_put(hd_guard *guard);
/* Around a call of NCCL: not 0 where it has failed and must not be used; leave either way. */
static inline int hd_guard_failed(hd_guard *guard) { return __atomic_load_n(&guard->failed, __ATOMIC_ACQUIRE); }
static inline int hd_guard_enter(hd_guard *guard)
{
    __atomic_add_fetch(&guard->inside, 1, __ATOMIC_SEQ_CST);
    return __atomic_load_n(&guard->failed, __ATOMIC_SEQ_CST) ? HD_NCCL_INTERNAL : 0;
}
static inline void hd_guard_leave(hd_guard *guard) { __atomic_sub_fetch(&guard->inside, 1, __ATOMIC_SEQ_CST); }
/* 1 for the one that may abort or destroy it. */
static inline int hd_guard_take(hd_guard *guard) { return !__atomic_exchange_n(&guard->taken, 1, __ATOMIC_SEQ_CST); }
/* Marks it as failed while an operation was in flight, waits a second at most for calls inside, and aborts it unless
 * that has been done. */
void hd_guard_fail(hd_guard *guard, int code, const char *what, const char *text);

/* NULL where there is no memory or no thread. */
hd_watched *hd_watch(hd_guard *guard, void *event, hd_query query, double seconds, const char *what);
/* Looks at the event now, for at most `seconds`; the state. */
int hd_watch_wait(hd_watched *watched, double seconds);
void hd_watch_put(hd_watched *watched);
/* Whether the watchdog has let go of it. */
static inline int hd_watch_released(hd_watched *watched) { return __atomic_load_n(&watched->refs, __ATOMIC_ACQUIRE) == 1; }
/* At the end of the process: looks at nothing any more, because the events go away. */
void hd_watch_stop(void);

#endif
