/* Streams, events and graphs, with the driver's signatures. A stream is a thread that runs its tasks in order; 0 is the
 * process's default stream. While a stream is captured its tasks go into a graph instead, and what CUDA then refuses
 * breaks the capture off here too. */
#define _GNU_SOURCE
#include "standin.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef struct task {
    task_fn run;
    void *arg;
    struct task *next;
} task;

typedef struct node {
    task_fn run;
    copy_fn copy;
    void *arg;
    struct node *next;
} node;

typedef struct graph {
    node *first, *last;
    struct stream *member[8]; /* the first one began it */
    int members, broken, over;
} graph;

typedef struct stream {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    pthread_t thread;
    task *first, *last;
    uint64_t pushed, done;
    graph *into;               /* what its tasks are captured into */
    uint64_t captured, joined; /* tasks of the capture; how many of them another member waits for */
} stream;

typedef struct {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    uint64_t recorded, reached;
    graph *of; /* where it was recorded last, in a capture */
    stream *on;
    uint64_t at;
    _Atomic int refs;
} event;

/* CUresult */
enum { STILL = 600, UNSUPPORTED = 900, INVALIDATED = 901, ISOLATION = 905, CAPTURED_EVENT = 907 };
enum { GLOBAL, THREAD_LOCAL, RELAXED };

static graph *_Atomic active; /* one capture at a time */
static _Thread_local int mode = GLOBAL;
static _Thread_local void *chosen; /* the thread's current stream, for those in lockstep with it */

int64_t nanoseconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

void nap(int64_t ns)
{
    struct timespec t = {ns / 1000000000, ns % 1000000000};
    nanosleep(&t, NULL);
}

static void *work(void *arg)
{
    stream *s = arg;
    pthread_mutex_lock(&s->lock);
    for (;;) {
        while (!s->first)
            pthread_cond_wait(&s->changed, &s->lock);
        task *t = s->first;
        pthread_mutex_unlock(&s->lock);
        t->run(t->arg);
        pthread_mutex_lock(&s->lock);
        s->first = t->next;
        if (!s->first)
            s->last = NULL;
        s->done++;
        pthread_cond_broadcast(&s->changed);
        free(t);
    }
    return NULL;
}

PUBLIC void *standin_stream_create(void)
{
    stream *s = calloc(1, sizeof *s);
    pthread_mutex_init(&s->lock, NULL);
    pthread_cond_init(&s->changed, NULL);
    pthread_create(&s->thread, NULL, work, s);
    pthread_detach(s->thread);
    return s;
}

static stream *default_stream;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static void make_default(void) { default_stream = standin_stream_create(); }

static stream *of(void *handle)
{
    if (handle)
        return handle;
    pthread_once(&once, make_default);
    return default_stream;
}

/* What may not be while a stream is captured, unless the thread has another mode. */
int capture_refuses(void)
{
    graph *g = atomic_load(&active);
    if (g && mode == GLOBAL)
        g->broken = UNSUPPORTED;
    return g && mode == GLOBAL;
}

int stream_captures(void *handle) { return of(handle)->into != NULL; }

void stream_push(void *handle, task_fn run, void *arg, copy_fn copy)
{
    stream *s = of(handle);
    task *t;
    if (s->into) {
        graph *g = s->into;
        node *n = malloc(sizeof *n);
        *n = (node){run, copy, arg, NULL};
        if (g->last)
            g->last->next = n;
        else
            g->first = n;
        g->last = n;
        s->captured++;
        return;
    }
    t = malloc(sizeof *t);
    *t = (task){run, arg, NULL};
    pthread_mutex_lock(&s->lock);
    if (s->last)
        s->last->next = t;
    else
        s->first = t;
    s->last = t;
    s->pushed++;
    pthread_cond_broadcast(&s->changed);
    pthread_mutex_unlock(&s->lock);
}

PUBLIC void standin_stream_synchronize(void *handle)
{
    stream *s = of(handle);
    if (s->into)
        s->into->broken = UNSUPPORTED;
    pthread_mutex_lock(&s->lock);
    uint64_t until = s->pushed;
    while (s->done < until)
        pthread_cond_wait(&s->changed, &s->lock);
    pthread_mutex_unlock(&s->lock);
}

/* --- what a kernel would do --- */
typedef struct {
    void *to;
    const void *from;
    size_t bytes;
    int64_t ns;
    int value;
} kernel;

static void run_kernel(void *arg)
{
    kernel *k = arg;
    if (k->ns)
        nap(k->ns);
    if (k->from)
        memcpy(k->to, k->from, k->bytes);
    else if (k->to)
        memset(k->to, k->value, k->bytes);
    free(k);
}

static void *copy_kernel(void *arg)
{
    kernel *k = malloc(sizeof *k);
    *k = *(kernel *)arg;
    return k;
}

/* After `seconds`, fill or copy memory in the stream's order; both addresses 0: only take the time. */
PUBLIC void standin_kernel(void *handle, void *to, const void *from, size_t bytes, int value, double seconds)
{
    kernel *k = malloc(sizeof *k);
    *k = (kernel){to, from, bytes, (int64_t)(seconds * 1e9), value};
    stream_push(handle, run_kernel, k, copy_kernel);
}

/* --- events --- */
typedef struct {
    event *event;
    uint64_t number;
} mark;

static void event_put(event *e)
{
    if (atomic_fetch_sub(&e->refs, 1) == 1)
        free(e);
}

static void reach(void *arg)
{
    mark *m = arg;
    pthread_mutex_lock(&m->event->lock);
    if (m->event->reached < m->number)
        m->event->reached = m->number;
    pthread_cond_broadcast(&m->event->changed);
    pthread_mutex_unlock(&m->event->lock);
    event_put(m->event);
    free(m);
}

static void await(void *arg)
{
    mark *m = arg;
    pthread_mutex_lock(&m->event->lock);
    while (m->event->reached < m->number)
        pthread_cond_wait(&m->event->changed, &m->event->lock);
    pthread_mutex_unlock(&m->event->lock);
    event_put(m->event);
    free(m);
}

static mark *mark_of(event *e, uint64_t number)
{
    mark *m = malloc(sizeof *m);
    atomic_fetch_add(&e->refs, 1);
    *m = (mark){e, number};
    return m;
}

PUBLIC int standin_event_create(void **made, unsigned flags)
{
    event *e = calloc(1, sizeof *e);
    (void)flags;
    pthread_mutex_init(&e->lock, NULL);
    pthread_cond_init(&e->changed, NULL);
    e->refs = 1;
    *made = e;
    return 0;
}

PUBLIC void standin_event_destroy(void *handle) { event_put(handle); }

PUBLIC int standin_event_record(void *handle, void *on)
{
    event *e = handle;
    stream *s = of(on);
    e->of = s->into;
    if (s->into) {
        e->on = s;
        e->at = s->captured;
        return 0;
    }
    pthread_mutex_lock(&e->lock);
    uint64_t number = ++e->recorded;
    pthread_mutex_unlock(&e->lock);
    stream_push(on, reach, mark_of(e, number), NULL);
    return 0;
}

/* A stream waits for what was captured: from now on it is captured as well. */
static int join(stream *s, event *e)
{
    graph *g = e->of;
    if (g->over)
        return INVALIDATED;
    if (!s->into) {
        s->into = g;
        s->captured = s->joined = 0;
        g->member[g->members++] = s;
    }
    if (e->on->joined < e->at)
        e->on->joined = e->at;
    return 0;
}

PUBLIC int standin_stream_wait_event(void *on, void *handle, unsigned flags)
{
    event *e = handle;
    stream *s = of(on);
    (void)flags;
    if (e->of)
        return join(s, e);
    if (s->into) {
        s->into->broken = ISOLATION;
        return ISOLATION;
    }
    pthread_mutex_lock(&e->lock);
    uint64_t number = e->recorded;
    pthread_mutex_unlock(&e->lock);
    if (number)
        stream_push(on, await, mark_of(e, number), NULL);
    return 0;
}

/* 0: all that was recorded has been reached; 600: not yet. */
PUBLIC int standin_event_query(void *handle)
{
    event *e = handle;
    if (e->of) {
        e->of->broken = CAPTURED_EVENT;
        return CAPTURED_EVENT;
    }
    if (capture_refuses())
        return UNSUPPORTED;
    pthread_mutex_lock(&e->lock);
    int done = e->reached >= e->recorded;
    pthread_mutex_unlock(&e->lock);
    return done ? 0 : STILL;
}

/* --- a thread's current stream --- */
PUBLIC void standin_stream_choose(void *handle) { chosen = handle; }

/* In lockstep the host waits with its current stream. */
PUBLIC int standin_stream_wait_lockstep(void *on, void *handle, unsigned flags)
{
    int rc = standin_stream_wait_event(on, handle, flags);
    if (!rc && of(on) == of(chosen))
        standin_stream_synchronize(on);
    return rc;
}

/* --- graphs --- */
PUBLIC int standin_stream_captures(void *handle, int *status)
{
    *status = stream_captures(handle);
    return 0;
}

PUBLIC int standin_thread_mode(int *exchanged)
{
    int before = mode;
    mode = *exchanged;
    *exchanged = before;
    return 0;
}

PUBLIC void standin_capture_begin(void *handle)
{
    graph *g = calloc(1, sizeof *g);
    stream *s = of(handle);
    s->into = g;
    s->captured = s->joined = 0;
    g->member[g->members++] = s;
    atomic_store(&active, g);
}

/* The graph; *error where it was broken off, or where a stream that joined it is not waited for. */
PUBLIC void *standin_capture_end(void *handle, int *error)
{
    graph *g = of(handle)->into;
    atomic_store(&active, NULL);
    *error = g->broken;
    for (int i = 0; i < g->members; i++) {
        stream *s = g->member[i];
        if (i && s->joined < s->captured && !*error)
            *error = 904; /* unjoined */
        s->into = NULL;
    }
    g->over = 1;
    return g;
}

/* Its tasks one after the other, in the order in which they were captured. */
PUBLIC void standin_replay(void *handle, void *on)
{
    graph *g = handle;
    for (node *n = g->first; n; n = n->next)
        stream_push(on, n->run, n->copy(n->arg), n->copy);
}
