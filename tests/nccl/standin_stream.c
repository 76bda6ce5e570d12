/* Streams and events. A stream is a thread that runs its tasks in order; 0 is the process's default stream. */
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

typedef struct {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    pthread_t thread;
    task *first, *last;
    uint64_t pushed, done;
} stream;

typedef struct {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    uint64_t recorded, reached;
    _Atomic int refs;
} event;

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

void stream_push(void *handle, task_fn run, void *arg)
{
    stream *s = of(handle);
    task *t = malloc(sizeof *t);
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

/* After `seconds`, fill or copy memory in the stream's order; both addresses 0: only take the time. */
PUBLIC void standin_kernel(void *handle, void *to, const void *from, size_t bytes, int value, double seconds)
{
    kernel *k = malloc(sizeof *k);
    *k = (kernel){to, from, bytes, (int64_t)(seconds * 1e9), value};
    stream_push(handle, run_kernel, k);
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

PUBLIC void *standin_event_create(void)
{
    event *e = calloc(1, sizeof *e);
    pthread_mutex_init(&e->lock, NULL);
    pthread_cond_init(&e->changed, NULL);
    e->refs = 1;
    return e;
}

PUBLIC void standin_event_destroy(void *handle) { event_put(handle); }

PUBLIC void standin_event_record(void *handle, void *on)
{
    event *e = handle;
    pthread_mutex_lock(&e->lock);
    uint64_t number = ++e->recorded;
    pthread_mutex_unlock(&e->lock);
    stream_push(on, reach, mark_of(e, number));
}

PUBLIC void standin_stream_wait_event(void *on, void *handle)
{
    event *e = handle;
    pthread_mutex_lock(&e->lock);
    uint64_t number = e->recorded;
    pthread_mutex_unlock(&e->lock);
    if (number)
        stream_push(on, await, mark_of(e, number));
}

/* 0: all that was recorded has been reached; 600: not yet. As cuEventQuery. */
PUBLIC int standin_event_query(void *handle)
{
    event *e = handle;
    pthread_mutex_lock(&e->lock);
    int done = e->reached >= e->recorded;
    pthread_mutex_unlock(&e->lock);
    return done ? 0 : 600;
}
