/* The watchdog of hd_nccl_watch.h. */
#include "hd_nccl_watch.h"
#include "hd_base.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define ROUND_NS 20000000 /* between two looks at the operations in flight */
/* Between two looks for new operations: waking the thread costs a call 50 to 90 us. */
#define IDLE_NS 100000000
#define AHEAD_NS 600000000 /* before a timeout it asks the ranks for their stacks */
#define CAPTURE_RELAXED 2  /* CU_STREAM_CAPTURE_MODE_RELAXED */
#define EVENT_FLAGS 2u     /* CU_EVENT_DISABLE_TIMING */

/* Protects the list, the devices and their spare events. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static hd_watched *flight;
static hd_gpu *devices;
static int running, stopped, forked;

static int load(const int *word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }

static int64_t now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* So many seconds from now; a very long time is no limit. */
static int64_t in(double seconds)
{
    return seconds < 1e9 ? now() + (int64_t)(seconds * 1e9) : INT64_MAX;
}

static void rest(int64_t ns)
{
    struct timespec t = {ns / 1000000000, ns % 1000000000};
    nanosleep(&t, NULL);
}

/* What NCCL itself reports; 0 for nothing. */
static int report(hd_guard *guard, char *text, size_t size)
{
    int state = HD_NCCL_SUCCESS, rc;
    const char *said;
    if (hd_guard_enter(guard)) {
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

/* Sets a thread's mode while another stream is captured: otherwise CUDA refuses queries, and
 * invalidates the capture. */
static int relaxed(const hd_cuda *cuda, int mode)
{
    if (cuda->mode)
        cuda->mode(&mode);
    return mode;
}

static int query(const hd_watched *w)
{
    const hd_cuda *cuda = &w->gpu->cuda;
    int before = relaxed(cuda, CAPTURE_RELAXED), rc = cuda->query(w->event);
    relaxed(cuda, before);
    return rc;
}

void hd_watched_name(const hd_watched *w, char *text, size_t size)
{
    snprintf(text, size, "%s #%llu %s", w->api, (unsigned long long)w->number, w->guard->where);
}

void hd_watched_explain(const hd_watched *w, char *text, size_t size)
{
    hd_beside *b = w->guard->beside;
    const uint64_t record = __atomic_load_n(&w->record, __ATOMIC_ACQUIRE);
    if (b && record)
        b->explain(b, record, text, size);
}

static enum hd_code code_of(int failed)
{
    switch (failed) {
    case HD_WATCH_LATE: return HD_ERR_TIMEOUT;
    case HD_WATCH_ABORTED: return HD_ERR_CLOSED;
    case HD_NCCL_REMOTE: return HD_ERR_FAILED;
    case HD_NCCL_USAGE:
    case HD_NCCL_ARGUMENT: return HD_ERR_MISMATCH;
    }
    return HD_ERR_BACKEND;
}

void hd_watched_end(hd_watched *w, int state)
{
    hd_beside *b = w->guard->beside;
    const int good = state == HD_WATCH_DONE || state == HD_WATCH_CAPTURED;
    uint64_t record = __atomic_load_n(&w->record, __ATOMIC_RELAXED);
    if (!b || !record) /* without a locked instruction: most calls end here */
        return;
    record = __atomic_exchange_n(&w->record, 0, __ATOMIC_ACQ_REL);
    for (uint32_t i = 0; record && i < w->records; i++)
        b->end(record + i, good ? 0 : code_of(load(&w->guard->failed)));
}

/* The current state of one operation. */
static int look(hd_watched *w)
{
    char said[2048], name[192];
    int state = load(&w->state), rc, code;
    if (state != HD_WATCH_RUNS)
        return state;
    if (load(&w->guard->failed))
        return HD_WATCH_FAILED; /* an aborted operation ends too, but its output is not a result */
    if (load(&w->starting))
        return HD_WATCH_RUNS;
    rc = query(w);
    /* also if it has ended: after an error it may end without a result */
    if ((rc == 0 || rc == HD_CUDA_NOT_READY) && (code = report(w->guard, said, sizeof said)) != 0) {
        hd_watched_name(w, name, sizeof name);
        hd_watched_explain(w, said, sizeof said);
        hd_guard_fail(w->guard, code, name, said);
    }
    if (load(&w->guard->failed))
        return HD_WATCH_FAILED;
    if (rc == 0)
        return HD_WATCH_DONE;
    if (rc == HD_CUDA_NOT_READY)
        return HD_WATCH_RUNS;
    return HD_WATCH_CUDA;
}

static void settle(hd_watched *w, int state)
{
    hd_watched_end(w, state);
    __atomic_store_n(&w->state, state, __ATOMIC_RELEASE);
}

static void examine(hd_watched *w)
{
    const int64_t deadline = __atomic_load_n(&w->deadline, __ATOMIC_RELAXED);
    const char *late = load(&w->starting) ? "had not started" : "was not done";
    char text[2048], name[192];
    int state = look(w);
    hd_beside *b = w->guard->beside;

    if (b && state == HD_WATCH_RUNS && deadline - now() < AHEAD_NS)
        b->expect(b, 0.0);
    if (state == HD_WATCH_RUNS && now() > deadline) {
        hd_watched_name(w, name, sizeof name);
        snprintf(text, sizeof text, "%s %s after %g s", name, late, w->limit);
        hd_watched_explain(w, text, sizeof text);
        if (b)
            b->report(b, text);
        hd_guard_fail(w->guard, HD_WATCH_LATE, name, text);
        state = HD_WATCH_FAILED;
    }
    if (state == HD_WATCH_CUDA) {
        hd_watched_name(w, name, sizeof name);
        snprintf(text, sizeof text, "CUDA reports an error while %s was in flight", name);
        hd_watched_explain(w, text, sizeof text);
        hd_guard_fail(w->guard, HD_WATCH_CUDA, name, text);
        state = HD_WATCH_FAILED;
    }
    if (state == HD_WATCH_FAILED && !load(&w->guard->freed))
        hd_watched_end(w, state); /* it may still use its tensors: they are kept */
    else if (state != HD_WATCH_RUNS)
        settle(w, state);
}

static void *guardian(void *unused)
{
    hd_watched **at, *w, *over, *first;
    (void)unused;
    for (;;) {
        over = NULL;
        pthread_mutex_lock(&lock);
        for (at = &flight; (w = *at) != NULL;) {
            if (load(&w->state) == HD_WATCH_RUNS) {
                at = &w->next;
            } else {
                *at = w->next;
                w->next = over;
                over = w;
            }
        }
        /* Only this thread removes operations, and the others add at the front: the rest of the
         * list stays as it is. */
        first = flight;
        pthread_mutex_unlock(&lock);
        while ((w = over) != NULL) {
            over = w->next;
            __atomic_store_n(&w->listed, 0, __ATOMIC_RELEASE);
            hd_watch_put(w);
        }
        for (w = first; w; w = w->next)
            if (!load(&stopped))
                examine(w);
        rest(first ? ROUND_NS : IDLE_NS);
    }
    return NULL;
}

static int start(void)
{
    if (!running)
        running = !hd_nccl_spawn(guardian, NULL);
    return !running;
}

hd_gpu *hd_gpu_of(const hd_cuda *cuda, void *context, int index)
{
    hd_gpu *found;
    pthread_mutex_lock(&lock);
    for (found = devices; found; found = found->next)
        if (found->index == index && found->cuda.record == cuda->record &&
            found->cuda.wait == cuda->wait)
            break;
    if (!found && (found = calloc(1, sizeof *found)) != NULL) {
        found->cuda = *cuda;
        found->context = context;
        found->index = index;
        found->next = devices;
        devices = found;
    }
    pthread_mutex_unlock(&lock);
    return found;
}

/* The default stream belongs to the thread's context: another device's must not be used by
 * mistake. */
static void *enter(hd_gpu *gpu)
{
    void *before = NULL;
    if (!gpu->cuda.context || gpu->cuda.context(&before) || before == gpu->context)
        return gpu->context;
    gpu->cuda.enter(gpu->context);
    return before;
}

static void leave(hd_gpu *gpu, void *before)
{
    if (before != gpu->context)
        gpu->cuda.enter(before);
}

int hd_captures(hd_gpu *gpu, void *stream)
{
    int status = 0;
    /* the default stream cannot be captured, and a query about it may invalidate another stream's
     * capture */
    return gpu->cuda.captures && stream && (gpu->cuda.captures(stream, &status) || status);
}

/* A spare operation with its event, or a new one. */
static int obtain(hd_gpu *gpu, hd_watched **made)
{
    hd_watched *w;
    int before, rc = 0;
    pthread_mutex_lock(&lock);
    if ((w = gpu->spare) != NULL)
        gpu->spare = w->next;
    else
        rc = start() ? HD_START_MEMORY : 0;
    pthread_mutex_unlock(&lock);
    *made = w;
    if (w || rc)
        return rc;
    if (!(w = calloc(1, sizeof *w)))
        return HD_START_MEMORY;
    w->gpu = gpu;
    before = relaxed(&gpu->cuda, CAPTURE_RELAXED);
    rc = gpu->cuda.create(&w->event, EVENT_FLAGS);
    relaxed(&gpu->cuda, before);
    if (rc)
        free(w);
    else
        *made = w;
    return rc;
}

/* Drops an operation that was not enqueued. */
static int given_up(hd_watched *w, int rc, const char *said, const char **call)
{
    *call = said;
    hd_watch_put(w);
    return rc;
}

int hd_start(hd_gpu *gpu, hd_guard *guard, void *current, void *stream, hd_watched **made,
             const char **call)
{
    void *before = enter(gpu);
    hd_watched *w = NULL;
    int captured, rc = obtain(gpu, &w);
    *made = NULL;
    if (rc) {
        leave(gpu, before);
        *call = "cuEventCreate";
        return rc;
    }
    __atomic_add_fetch(&guard->refs, 1, __ATOMIC_ACQ_REL);
    w->guard = guard;
    w->keep = NULL;
    w->after = NULL;
    w->refs = 1;
    w->listed = w->starting = 0;
    w->record = 0;
    w->records = 0;
    w->other_stream = stream != current;
    captured = hd_captures(gpu, current);
    w->state = captured ? HD_WATCH_CAPTURED : HD_WATCH_RUNS;
    if (w->other_stream) {
        if (!captured && hd_captures(gpu, stream))
            rc = given_up(w, HD_START_OTHER_CAPTURES, "", call);
        else if ((rc = gpu->cuda.record(w->event, current)) != 0)
            rc = given_up(w, rc, "cuEventRecord", call);
        else if ((rc = gpu->cuda.wait(stream, w->event, 0)) != 0)
            rc = given_up(w, rc, "cuStreamWaitEvent", call);
    }
    leave(gpu, before);
    if (!rc)
        *made = w;
    return rc;
}

/* Lets the watchdog check it. */
static void list(hd_watched *w)
{
    w->listed = 1;
    __atomic_add_fetch(&w->refs, 1, __ATOMIC_ACQ_REL);
    pthread_mutex_lock(&lock);
    w->next = flight;
    flight = w;
    pthread_mutex_unlock(&lock);
}

void hd_starting(hd_watched *w, double seconds)
{
    if (w->state == HD_WATCH_CAPTURED)
        return;
    w->limit = seconds;
    w->deadline = in(seconds);
    w->starting = 1;
    list(w);
}

int hd_started(hd_watched *w, void *stream, double seconds, const char **call)
{
    void *before;
    int rc;
    if (w->state == HD_WATCH_CAPTURED && !w->other_stream)
        return 0; /* no thread has to wait for it */
    before = enter(w->gpu);
    rc = w->gpu->cuda.record(w->event, stream);
    leave(w->gpu, before);
    *call = "cuEventRecord";
    if (rc || w->state == HD_WATCH_CAPTURED)
        return rc;
    w->limit = seconds;
    __atomic_store_n(&w->deadline, in(seconds), __ATOMIC_RELAXED);
    __atomic_store_n(&w->starting, 0, __ATOMIC_RELEASE);
    if (!hd_watch_listed(w))
        list(w);
    return 0;
}

int hd_order(hd_watched *w, void *stream)
{
    void *before;
    int rc;
    if (w->state == HD_WATCH_CAPTURED && !w->other_stream)
        return 0; /* it is on the stream that captures, without an event */
    before = enter(w->gpu);
    rc = w->gpu->cuda.wait(stream, w->event, 0);
    leave(w->gpu, before);
    return rc;
}

int hd_watch_wait(hd_watched *w, double seconds)
{
    int64_t end = in(seconds), nap = 1000;
    int state;
    for (;;) {
        state = look(w);
        if (state == HD_WATCH_DONE)
            settle(w, state);
        /* a CUDA error is for the watchdog, which has the error text and aborts */
        if (state == HD_WATCH_DONE || state == HD_WATCH_FAILED || now() >= end)
            return state == HD_WATCH_CUDA ? HD_WATCH_RUNS : state;
        rest(nap);
        if (nap < 200000)
            nap *= 2;
    }
}

void hd_watch_put(hd_watched *w)
{
    if (!w || __atomic_sub_fetch(&w->refs, 1, __ATOMIC_ACQ_REL) != 0)
        return;
    hd_watched_end(w, w->state); /* if it was not enqueued, or captured */
    hd_guard_put(w->guard);
    pthread_mutex_lock(&lock);
    w->next = w->gpu->spare;
    w->gpu->spare = w;
    pthread_mutex_unlock(&lock);
}

void hd_watch_drop(hd_watched *w)
{
    if (!w)
        return;
    hd_watched_end(w, HD_WATCH_FAILED);
    if (hd_watch_listed(w))
        __atomic_store_n(&w->state, HD_WATCH_FAILED, __ATOMIC_RELEASE);
    hd_watch_put(w);
}

static void in_child(void) { forked = 1; }

static void watch_forks(void) { pthread_atfork(NULL, NULL, in_child); }

int hd_watch_forks(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    return pthread_once(&once, watch_forks);
}

int hd_watch_forked(void) { return forked; }

void hd_watch_stop(void) { __atomic_store_n(&stopped, 1, __ATOMIC_RELEASE); }
