/* The server's thread: its loop, its listening sockets, its start and its end. */
#define _GNU_SOURCE /* accept4, sched_getaffinity */
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include "hd_conn.h"
#include "hd_conn_life.h"
#include "hd_deadlines.h"
#include "hd_mask.h"
#include "hd_receive.h"
#include "hd_reply.h"
#include "hd_server.h"
#include "hd_table.h"
#include "hd_waiting.h"
#include "hd_wire.h"

enum { EVENTS = 256, ACCEPTS = 64 };
#define PAUSE_NS 50000000 /* before accepting again when there are no descriptors left */
#define SPIN_NS 20000     /* how long to look for the next request without sleeping */

/* --- fork --------------------------------------------------------------------------------------
 * The thread does not exist in a child, but the sockets would: as long as a child had them open,
 * no peer would notice that this process has died. So the child closes them. */

static pthread_mutex_t servers_mutex = PTHREAD_MUTEX_INITIALIZER;
static hd_server *servers;

static void before_fork(void)
{
    pthread_mutex_lock(&servers_mutex);
    for (hd_server *s = servers; s; s = s->next)
        pthread_mutex_lock(&s->mutex);
}

static void after_fork(void)
{
    for (hd_server *s = servers; s; s = s->next)
        pthread_mutex_unlock(&s->mutex);
    pthread_mutex_unlock(&servers_mutex);
}

static void close_list(hd_link *list)
{
    for (hd_link *l = list->next; l != list; l = l->next) {
        hd_conn *c = HD_CONN_OF(l, all);
        if (c->fd >= 0)
            close(c->fd);
    }
}

static void in_child(void)
{
    for (hd_server *s = servers; s; s = s->next) {
        close_list(&s->strangers);
        close_list(&s->members);
        for (int i = 0; i < s->listener_count; i++)
            close(s->listeners[i]);
        close(s->epoll);
        close(s->wake);
        pthread_mutex_unlock(&s->mutex);
    }
    servers = NULL;
    pthread_mutex_unlock(&servers_mutex);
}

static void watch_forks(void) { pthread_atfork(before_fork, after_fork, in_child); }

/* --- connections -------------------------------------------------------------------------------
 */

static void expired(hd_conn *c)
{
    hd_server *s = c->server;
    if (c->state == HD_WAITING)
        hd_request_late(c);
    else if (c->state == HD_READY && !c->have && c->active + s->limits.idle_ns > s->now)
        hd_set_deadline(c, c->active + s->limits.idle_ns);
    else
        hd_close(c, 1);
}

static void pause_listening(hd_server *s, int paused)
{
    s->paused = paused;
    s->pause_end = s->now + PAUSE_NS;
    for (int i = 0; i < s->listener_count; i++) {
        struct epoll_event e = {.events = paused ? 0 : EPOLLIN, .data.ptr = &s->listeners[i]};
        epoll_ctl(s->epoll, EPOLL_CTL_MOD, s->listeners[i], &e);
    }
}

static void drop_oldest(hd_server *s)
{
    if (!hd_link_alone(&s->strangers))
        hd_close(HD_CONN_OF(s->strangers.next, all), 1);
}

static void accept_some(hd_server *s, int listener)
{
    for (int i = 0; i < ACCEPTS; i++) {
        int fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
        if (fd < 0) {
            if (errno == EINTR || errno == ECONNABORTED)
                continue;
            if (errno == EAGAIN || errno == EWOULDBLOCK)
                return;
            /* No descriptors left: close a stranger's, which is free at once. If only one were
             * accepted per pause, hundreds of silent strangers would hold up a client behind them
             * for a minute. */
            if (!hd_link_alone(&s->strangers)) {
                drop_oldest(s);
                continue;
            }
            pause_listening(s, 1);
            return;
        }
        s->stats.accepted++;
        if ((int64_t)s->stats.strangers >= s->limits.strangers)
            drop_oldest(s);
        if (hd_deadlines_room(s) || !hd_conn_new(s, fd))
            close(fd);
    }
}

/* --- the loop ----------------------------------------------------------------------------------
 */

static int sleep_ms(hd_server *s)
{
    int64_t until = s->heap_size ? s->heap[0]->deadline : INT64_MAX;
    if (s->paused && s->pause_end < until)
        until = s->pause_end;
    if (until == INT64_MAX)
        return -1;
    int64_t left = until - hd_clock();
    if (left <= 0)
        return 0;
    left = (left + 999999) / 1000000; /* rounded up, so as not to wake too early, and again */
    return left > 3600000 ? 3600000 : (int)left;
}

static void free_closed(hd_server *s)
{
    while (!hd_link_alone(&s->closed)) {
        hd_link *l = s->closed.next;
        hd_link_out(l);
        hd_conn_free(HD_CONN_OF(l, all));
    }
}

static void handle(hd_server *s, const struct epoll_event *e)
{
    char *what = e->data.ptr;
    if (what == (char *)&s->wake)
        return; /* stop is set; the loop checks it */
    if (what >= (char *)s->listeners && what < (char *)(s->listeners + s->listener_count)) {
        if (!s->paused)
            accept_some(s, *(int *)what);
        return;
    }
    hd_conn *c = e->data.ptr;
    if (c->state == HD_CLOSED)
        return;
    if (e->events & EPOLLOUT)
        hd_conn_writable(c);
    else if (e->events & (EPOLLIN | EPOLLHUP | EPOLLERR))
        hd_conn_readable(c);
}

/* Waits for events. A client that makes call after call sends its next request within SPIN_NS of
 * the last reply; a sleeping thread takes longer than that to wake up. This one does not yield: a
 * thread that has yielded waits for its turn behind threads that compute, and a sleeping one is
 * woken before it. */
static int next_events(hd_server *s, struct epoll_event *events, int ms)
{
    int64_t end = s->spins ? s->now + SPIN_NS : 0;
    int n = 0;
    if (ms)
        while (n == 0 && hd_clock() < end)
            n = epoll_wait(s->epoll, events, EVENTS, 0);
    return n == 0 ? epoll_wait(s->epoll, events, EVENTS, ms) : n;
}

static void *run(void *arg)
{
    hd_server *s = arg;
    struct epoll_event events[EVENTS];
    pthread_mutex_lock(&s->mutex);
    s->now = hd_clock();
    while (!s->stop) {
        int ms = sleep_ms(s);
        pthread_mutex_unlock(&s->mutex);
        int n = next_events(s, events, ms);
        pthread_mutex_lock(&s->mutex);
        s->now = hd_clock();
        for (int i = 0; i < n && !s->stop; i++)
            handle(s, &events[i]);
        while (s->heap_size && s->heap[0]->deadline <= s->now)
            expired(s->heap[0]);
        if (s->paused && s->pause_end <= s->now)
            pause_listening(s, 0);
        free_closed(s);
    }
    pthread_mutex_unlock(&s->mutex);
    return NULL;
}

/* --- start and stop ----------------------------------------------------------------------------
 */

static void free_server(hd_server *s)
{
    if (s->epoll >= 0)
        close(s->epoll);
    if (s->wake >= 0)
        close(s->wake);
    for (int i = 0; i < s->listener_count; i++) {
        shutdown(s->listeners[i], SHUT_RDWR); /* also takes effect if the caller has a duplicate */
        close(s->listeners[i]);
    }
    hd_table_free(&s->table);
    explicit_bzero(s->key, sizeof s->key);
    pthread_mutex_destroy(&s->mutex);
    free(s->heap);
    free(s->scratch);
    free(s->build);
    free(s->build_pieces);
    free(s->items);
    free(s);
}

static int prepare(hd_server *s)
{
    uint64_t seed;
    cpu_set_t cores;
    s->spins = sched_getaffinity(0, sizeof cores, &cores)
                   ? errno == EINVAL /* the machine has more CPUs than the set */
                   : CPU_COUNT(&cores) > 1;
    s->epoll = epoll_create1(EPOLL_CLOEXEC);
    s->wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    s->scratch = malloc(HD_SCRATCH);
    if (s->epoll < 0 || s->wake < 0 || !s->scratch || hd_random(&seed, sizeof seed) ||
        hd_random(s->identity, sizeof s->identity) || hd_table_init(&s->table, seed))
        return -1;
    struct epoll_event e = {.events = EPOLLIN, .data.ptr = &s->wake};
    if (epoll_ctl(s->epoll, EPOLL_CTL_ADD, s->wake, &e))
        return -1;
    for (int i = 0; i < s->listener_count; i++) {
        e.data.ptr = &s->listeners[i];
        int flags = fcntl(s->listeners[i], F_GETFL);
        if (flags < 0 || fcntl(s->listeners[i], F_SETFL, flags | O_NONBLOCK) ||
            epoll_ctl(s->epoll, EPOLL_CTL_ADD, s->listeners[i], &e))
            return -1;
    }
    return 0;
}

hd_server *hd_server_start(const int *listeners, int count, const uint8_t key[HD_KEY],
                           const hd_limits *limits)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    hd_server *s = calloc(1, sizeof *s);
    if (!s)
        return NULL;
    pthread_mutex_init(&s->mutex, NULL);
    memcpy(s->listeners, listeners, (size_t)count * sizeof *listeners);
    s->listener_count = count;
    memcpy(s->key, key, HD_KEY);
    s->limits = *limits;
    s->pid = getpid();
    hd_link_init(&s->strangers);
    hd_link_init(&s->members);
    hd_link_init(&s->closed);
    hd_link_init(&s->for_joined);
    pthread_once(&once, watch_forks);
    sigset_t before;
    hd_mask_signals(&before);
    int failed = prepare(s) ? errno : 0;
    if (!failed) {
        pthread_mutex_lock(&servers_mutex);
        failed = pthread_create(&s->thread, NULL, run, s);
        if (!failed) {
            s->next = servers;
            servers = s;
        }
        pthread_mutex_unlock(&servers_mutex);
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (failed) {
        free_server(s);
        errno = failed;
        return NULL;
    }
    return s;
}

void hd_server_stop(hd_server *s)
{
    uint64_t one = 1;
    if (!hd_server_here(s))
        return; /* the child has closed it already; the memory is a copy of the parent's */
    pthread_mutex_lock(&s->mutex);
    s->stop = 1;
    pthread_mutex_unlock(&s->mutex);
    while (write(s->wake, &one, sizeof one) < 0 && errno == EINTR)
        ;
    pthread_join(s->thread, NULL);
    pthread_mutex_lock(&servers_mutex);
    hd_server **at = &servers;
    while (*at && *at != s)
        at = &(*at)->next;
    if (*at)
        *at = s->next;
    pthread_mutex_unlock(&servers_mutex);
    while (!hd_link_alone(&s->strangers))
        hd_close(HD_CONN_OF(s->strangers.next, all), 0);
    while (!hd_link_alone(&s->members))
        hd_close(HD_CONN_OF(s->members.next, all), 0);
    free_closed(s);
    free_server(s);
}

void hd_server_stats(hd_server *s, hd_stats *out)
{
    pthread_mutex_lock(&s->mutex);
    *out = s->stats;
    out->keys = s->table.values;
    out->bytes = s->table.bytes;
    pthread_mutex_unlock(&s->mutex);
}

int hd_server_here(const hd_server *s) { return s->pid == getpid(); }
