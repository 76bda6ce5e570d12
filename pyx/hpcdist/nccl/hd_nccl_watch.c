/* The watchdog of hd_nccl_watch.h. */
#include "hd_nccl_watch.h"

#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define ROUND_NS 20000000 /* between two looks */
#define PATIENCE 1.0      /* seconds for calls inside NCCL to come out before it is aborted under them */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t more = PTHREAD_COND_INITIALIZER;
static hd_watched *flight;
static int running, stopped;

static int load(const int *word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }

static int64_t now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static void rest(int64_t ns)
{
    struct timespec t = {ns / 1000000000, ns % 1000000000};
    nanosleep(&t, NULL);
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
    if (guard && __atomic_sub_fetch(&guard->refs, 1, __ATOMIC_ACQ_REL) == 0)
        free(guard);
}

void hd_guard_fail(hd_guard *guard, int code, const char *what, const char *text)
{
    static pthread_mutex_t first = PTHREAD_MUTEX_INITIALIZER;
    int64_t end = now() + (int64_t)(PATIENCE * 1e9);

    pthread_mutex_lock(&first); /* the first failure is the one that tells */
    if (!load(&guard->failed)) {
        snprintf(guard->what, sizeof guard->what, "%s", what);
        snprintf(guard->text, sizeof guard->text, "%s", text);
        __atomic_store_n(&guard->failed, code, __ATOMIC_SEQ_CST);
    }
    pthread_mutex_unlock(&first);
    while (load(&guard->inside) && now() < end)
        rest(1000000);
    if (hd_guard_take(guard))
        guard->nccl->abort(guard->comm);
}

/* What NCCL reports by itself; 0 for nothing. */
static int report(hd_guard *guard, char *text, size_t size)
{
    int state = HD_NCCL_SUCCESS, rc;
    const char *said;
    if (hd_guard_enter(guard) || load(&guard->taken)) {
        hd_guard_leave(guard);
        return 0;
    }
    rc = guard->nccl->async_error(guard->comm, &state);
    if (rc == HD_NCCL_SUCCESS)
        rc = state;
    if (rc == HD_NCCL_IN_PROGRESS)
        rc = HD_NCCL_SUCCESS;
    if (rc != HD_NCCL_SUCCESS) {
        said = guard->nccl->last_error(guard->comm);
        snprintf(text, size, "%.400s", said ? said : "");
    }
    hd_guard_leave(guard);
    return rc;
}

/* The state of one operation now. */
static int look(hd_watched *w)
{
    char said[512];
    int state = load(&w->state), rc, code;
    if (state != HD_WATCH_RUNS)
        return state;
    if (load(&w->guard->failed))
        return HD_WATCH_FAILED; /* an aborted operation ends too, but what it left is no result */
    rc = w->query(w->event);
    /* also where it is over: after an error it may end without a result */
    if ((rc == 0 || rc == HD_WATCH_NOT_READY) && (code = report(w->guard, said, sizeof said)) != 0)
        hd_guard_fail(w->guard, code, w->what, said);
    if (load(&w->guard->failed))
        return HD_WATCH_FAILED;
    if (rc == 0)
        return HD_WATCH_DONE;
    if (rc == HD_WATCH_NOT_READY)
        return HD_WATCH_RUNS;
    return HD_WATCH_CUDA;
}

static void settle(hd_watched *w, int state)
{
    __atomic_store_n(&w->state, state, __ATOMIC_RELEASE);
}

static void examine(hd_watched *w)
{
    char text[512];
    int state = look(w);

    if (state == HD_WATCH_RUNS && now() > w->deadline) {
        snprintf(text, sizeof text, "%s was not done after %g s", w->what, w->limit);
        hd_guard_fail(w->guard, HD_WATCH_LATE, w->what, text);
        state = HD_WATCH_FAILED;
    }
    if (state == HD_WATCH_CUDA) {
        snprintf(text, sizeof text, "CUDA reports an error while %s was in flight", w->what);
        hd_guard_fail(w->guard, HD_WATCH_CUDA, w->what, text);
        state = HD_WATCH_FAILED;
    }
    if (state != HD_WATCH_RUNS)
        settle(w, state);
}

static void *guardian(void *unused)
{
    hd_watched **at, *w, *over, *first;
    (void)unused;
    for (;;) {
        pthread_mutex_lock(&lock);
        while (!flight)
            pthread_cond_wait(&more, &lock);
        over = NULL;
        for (at = &flight; (w = *at) != NULL;) {
            if (load(&w->state) == HD_WATCH_RUNS) {
                at = &w->next;
            } else {
                *at = w->next;
                w->next = over;
                over = w;
            }
        }
        /* Nobody but this thread takes out, and others put in at the front: the rest of the list stays as it is. */
        first = flight;
        pthread_mutex_unlock(&lock);
        while ((w = over) != NULL) {
            over = w->next;
            hd_watch_put(w);
        }
        for (w = first; w; w = w->next)
            if (!load(&stopped))
                examine(w);
        rest(ROUND_NS);
    }
    return NULL;
}

static int start(void)
{
    pthread_t thread;
    sigset_t all, before;
    int rc;
    if (running)
        return 0;
    /* signals are Python's: they must reach its main thread */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    rc = pthread_create(&thread, NULL, guardian, NULL);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (rc == 0) {
        pthread_detach(thread);
        running = 1;
    }
    return rc;
}

hd_watched *hd_watch(hd_guard *guard, void *event, hd_query query, double seconds, const char *what)
{
    hd_watched *w = calloc(1, sizeof *w);
    if (!w)
        return NULL;
    __atomic_add_fetch(&guard->refs, 1, __ATOMIC_ACQ_REL);
    w->guard = guard;
    w->event = event;
    w->query = query;
    w->limit = seconds;
    w->deadline = seconds < 1e9 ? now() + (int64_t)(seconds * 1e9) : INT64_MAX;
    w->refs = 2; /* the caller's and the list's */
    snprintf(w->what, sizeof w->what, "%s", what);
    pthread_mutex_lock(&lock);
    if (start() != 0) {
        pthread_mutex_unlock(&lock);
        hd_guard_put(guard);
        free(w);
        return NULL;
    }
    w->next = flight;
    flight = w;
    pthread_cond_signal(&more);
    pthread_mutex_unlock(&lock);
    return w;
}

int hd_watch_wait(hd_watched *w, double seconds)
{
    int64_t end = now() + (int64_t)(seconds * 1e9), nap = 1000;
    int state;
    for (;;) {
        state = look(w);
        if (state == HD_WATCH_DONE)
            settle(w, state);
        /* an error of CUDA is for the watchdog, which has words for it and aborts */
        if (state == HD_WATCH_DONE || state == HD_WATCH_FAILED || now() >= end)
            return state == HD_WATCH_CUDA ? HD_WATCH_RUNS : state;
        rest(nap);
        if (nap < 200000)
            nap *= 2;
    }
}

void hd_watch_put(hd_watched *w)
{
    if (w && __atomic_sub_fetch(&w->refs, 1, __ATOMIC_ACQ_REL) == 0) {
        hd_guard_put(w->guard);
        free(w);
    }
}

void hd_watch_stop(void) { __atomic_store_n(&stopped, 1, __ATOMIC_RELEASE); }
