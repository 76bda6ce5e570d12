/* Guards of communicators: see hd_nccl_guard.h. */
#include "hd_nccl_guard.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "hd_mask.h"

/* Seconds that calls inside NCCL have to return before NCCL is aborted under them. */
#define PATIENCE 1.0

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

int hd_nccl_spawn(void *(*run)(void *), void *arg)
{
    pthread_t thread;
    sigset_t before;
    int rc;
    hd_mask_signals(&before);
    rc = pthread_create(&thread, NULL, run, arg);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (rc == 0)
        pthread_detach(thread);
    return rc;
}

hd_guard *hd_guard_new(const hd_nccl *nccl, ncclComm_t comm)
{
    hd_guard *made = calloc(1, sizeof *made);
    if (made) {
        made->nccl = nccl;
        made->comm = comm;
        made->refs = 1;
    }
    return made;
}

void hd_guard_put(hd_guard *guard)
{
    if (!guard || __atomic_sub_fetch(&guard->refs, 1, __ATOMIC_ACQ_REL))
        return;
    if (guard->beside)
        guard->beside->put(guard->beside);
    free(guard);
}

void hd_guard_name(hd_guard *guard, const char *where)
{
    snprintf(guard->where, sizeof guard->where, "%s", where);
}

void hd_guard_beside(hd_guard *guard, hd_beside *beside)
{
    if (guard->beside)
        return;
    __atomic_add_fetch(&beside->refs, 1, __ATOMIC_ACQ_REL);
    guard->beside = beside;
}

void hd_guard_lose(hd_guard *guard, int code, const char *what, const char *text)
{
    static pthread_mutex_t first = PTHREAD_MUTEX_INITIALIZER;
    pthread_mutex_lock(&first); /* only the first failure is kept */
    if (!hd_guard_failed(guard)) {
        snprintf(guard->what, sizeof guard->what, "%s", what);
        snprintf(guard->text, sizeof guard->text, "%s", text);
        __atomic_store_n(&guard->failed, code, __ATOMIC_SEQ_CST);
    }
    pthread_mutex_unlock(&first);
}

/* Waits PATIENCE at most until a word is 0 (or, if wanted is 1, until it is not); returns it. */
static int await(const int *word, int wanted)
{
    const double end = now() + PATIENCE;
    struct timespec nap = {0, 20000};
    int found;
    while (!!(found = __atomic_load_n(word, __ATOMIC_SEQ_CST)) != wanted && now() < end) {
        nanosleep(&nap, NULL);
        if (nap.tv_nsec < 1000000)
            nap.tv_nsec *= 2;
    }
    return found;
}

int hd_guard_empty(hd_guard *guard) { return await(&guard->inside, 0); }

int hd_guard_await_freed(hd_guard *guard) { return await(&guard->freed, 1); }

void hd_guard_set_freed(hd_guard *guard) { __atomic_store_n(&guard->freed, 1, __ATOMIC_SEQ_CST); }

static void *abort_one(void *arg)
{
    hd_guard *guard = arg;
    hd_guard_empty(guard); /* a call that does not return waits for another rank: this wakes it */
    if (hd_guard_take(guard)) {
        guard->nccl->abort(guard->comm);
        hd_guard_set_freed(guard);
    }
    hd_guard_put(guard);
    return NULL;
}

void hd_guard_fail(hd_guard *guard, int code, const char *what, const char *text)
{
    hd_guard_lose(guard, code, what, text);
    if (__atomic_exchange_n(&guard->ending, 1, __ATOMIC_SEQ_CST))
        return;
    __atomic_add_fetch(&guard->refs, 1, __ATOMIC_ACQ_REL);
    if (hd_nccl_spawn(abort_one, guard))
        abort_one(guard);
}
