/* What protects a communicator of NCCL: who is inside of it, who may free it, and its abort after a
 * failure. Each abort has a thread of its own: NCCL frees device memory, for which CUDA waits for
 * the kernels of the device's other communicators, and these may only end when they are aborted
 * too. */
#ifndef HD_NCCL_GUARD_H
#define HD_NCCL_GUARD_H

#include "hd_beside.h"
#include "hd_nccl.h"

/* One communicator. The thread that sets `taken` may abort or destroy it, once, after giving
 * the calls inside time to return. */
typedef struct {
    const hd_nccl *nccl;
    ncclComm_t comm;
    int refs;   /* atomic */
    int inside; /* atomic: calls of this process that are inside NCCL right now */
    int taken;  /* atomic */
    int ending; /* atomic: it has a thread that aborts it */
    int freed;  /* atomic: abort or destroy has returned */
    int failed; /* atomic: 0, else an HD_NCCL_ code or one of HD_WATCH_LATE and its neighbours */
    int raised; /* an exception has been made of it; accessed with the GIL held */
    char where[128]; /* "of the group 'world' on rank 0" */
    char what[192];  /* the operation that was in flight */
    char text[2048];
    hd_beside *beside; /* the flight recorder; NULL: there is none */
} hd_guard;

/* An operation exceeded its time; CUDA reports an error; this process has aborted the communicator
 * itself. */
enum { HD_WATCH_LATE = -1, HD_WATCH_CUDA = -2, HD_WATCH_ABORTED = -3 };

hd_guard *hd_guard_new(const hd_nccl *nccl, ncclComm_t comm);
void hd_guard_put(hd_guard *guard);
/* The owner, for messages; set it before its first operation. */
void hd_guard_name(hd_guard *guard, const char *where);
/* Its operations' flight recorder, of which it becomes one of the owners; likewise. */
void hd_guard_beside(hd_guard *guard, hd_beside *beside);
static inline int hd_guard_failed(hd_guard *guard)
{
    return __atomic_load_n(&guard->failed, __ATOMIC_ACQUIRE);
}
static inline int hd_guard_taken(hd_guard *guard)
{
    return __atomic_load_n(&guard->taken, __ATOMIC_ACQUIRE);
}
/* Brackets a call of NCCL. Not 0 if the communicator must not be used any more; leave in either
 * case. This thread counts itself before it checks, and the thread that frees sets the word before
 * it counts: one of the two sees the other. */
static inline int hd_guard_enter(hd_guard *guard)
{
    __atomic_add_fetch(&guard->inside, 1, __ATOMIC_SEQ_CST);
    return __atomic_load_n(&guard->failed, __ATOMIC_SEQ_CST) ||
                   __atomic_load_n(&guard->taken, __ATOMIC_SEQ_CST)
               ? HD_NCCL_INTERNAL
               : 0;
}
static inline void hd_guard_leave(hd_guard *guard)
{
    __atomic_sub_fetch(&guard->inside, 1, __ATOMIC_SEQ_CST);
}
/* Returns 1 to the one caller that may abort or destroy it. */
static inline int hd_guard_take(hd_guard *guard)
{
    return !__atomic_exchange_n(&guard->taken, 1, __ATOMIC_SEQ_CST);
}
/* Marks it as failed unless it already is: the operations in flight have no result. */
void hd_guard_lose(hd_guard *guard, int code, const char *what, const char *text);
/* Waits a second at most for the calls inside; returns how many are left. The communicator is taken
 * or failed, so no new call gets in. */
int hd_guard_empty(hd_guard *guard);
/* After abort or destroy by the thread that took it. */
void hd_guard_set_freed(hd_guard *guard);
/* Waits a second at most until then; returns whether it is so. */
int hd_guard_await_freed(hd_guard *guard);
/* Marks it as failed while an operation was in flight; a thread waits for the calls inside, and
 * aborts it unless that has been done. */
void hd_guard_fail(hd_guard *guard, int code, const char *what, const char *text);
/* Starts a thread that Python does not know; 0 for success. */
int hd_nccl_spawn(void *(*run)(void *), void *arg);

#endif
