#define _GNU_SOURCE

#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <time.h>
#include <unistd.h>

#include "hd_base.h"
#include "hd_mask.h"

#define MS 1000000LL /* ns */
#define LONG_CALL 3  /* seconds */
/* ns: between looks at the clock that are noted; without one for so long, the process was
 * stopped. */
#define LOOKS (20 * MS)
#define STOPPED (1000 * MS)

int64_t hd_uptime(void)
{
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (int64_t)ts.tv_sec * 1000000000LL + ts.tv_nsec;
}

/* The time for which this process was stopped: whoever looks at the clock first after that adds
 * it. */
static struct {
    int watched;     /* atomic: so many threads look often, whatever else this process does */
    int64_t seen;    /* atomic, of hd_uptime(): the last look, or one shortly before; 0: none */
    int64_t counted; /* atomic: the look after which a stop was counted last */
    int64_t stopped; /* atomic: ns in all */
} clock_of_process;

/* `last`: what was seen then. */
static void look(int64_t uptime, int64_t last)
{
    int64_t counted = __atomic_load_n(&clock_of_process.counted, __ATOMIC_ACQUIRE);
    if (uptime - last > STOPPED) {
        if (counted != last &&
            __atomic_compare_exchange_n(&clock_of_process.counted, &counted, last, 0,
                                        __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
            __atomic_add_fetch(&clock_of_process.stopped, uptime - last, __ATOMIC_ACQ_REL);
        else /* another thread does; not in the child of a fork, which goes on without it */
            for (int i = 0;
                 i < 1000 && last == __atomic_load_n(&clock_of_process.seen, __ATOMIC_ACQUIRE); i++)
                sched_yield();
    }
    /* Fails if another thread has looked, or nobody does any more. */
    (void)__atomic_compare_exchange_n(&clock_of_process.seen, &last, uptime, 0, __ATOMIC_ACQ_REL,
                                      __ATOMIC_ACQUIRE);
}

int64_t hd_now(void)
{
    for (;;) {
        const int64_t stopped = __atomic_load_n(&clock_of_process.stopped, __ATOMIC_ACQUIRE);
        const int64_t uptime = hd_uptime(),
                      last = __atomic_load_n(&clock_of_process.seen, __ATOMIC_ACQUIRE);
        if (last && uptime - last > LOOKS)
            look(uptime, last);
        /* If it has changed, the process may have been stopped between these lines. */
        if (stopped == __atomic_load_n(&clock_of_process.stopped, __ATOMIC_ACQUIRE))
            return uptime - stopped;
    }
}

void hd_now_watched(int more)
{
    const int watched = __atomic_add_fetch(&clock_of_process.watched, more, __ATOMIC_ACQ_REL);
    __atomic_store_n(&clock_of_process.seen, watched ? hd_uptime() : 0, __ATOMIC_RELEASE);
}

int64_t hd_ns(double seconds)
{
    return seconds >= 0 && seconds < 9e9 ? (int64_t)(seconds * 1e9) : HD_NEVER;
}

int64_t hd_later(int64_t from, int64_t ns) { return ns > HD_NEVER - from ? HD_NEVER : from + ns; }

int64_t hd_until(double seconds) { return hd_later(hd_now(), hd_ns(seconds)); }

void hd_waiter_init(hd_waiter *w, int spin, double timeout_s)
{
    w->n = 0;
    /* ~50 us of spinning covers a healthy collective; without a spare core every spin steals the
     * time slice of the very peer that this rank waits for. */
    w->spins = spin ? 2000 : 30;
    w->start = w->own = 0;
    w->clock = NULL;
    w->limit = hd_ns(timeout_s);
    w->next_hook = 0;
    w->naps = 0;
    w->core = NULL;
    w->their_core = NULL;
}

uint32_t hd_core(void) { return (uint32_t)(sched_getcpu() + 1); }

/* Whether the peer is on this core, as far as both have shown. The scheduler may move this thread
 * while it waits, so it shows its core whenever that has changed. */
static int shares_core(const hd_waiter *w)
{
    uint32_t here;
    if (!w->core)
        return 0;
    here = hd_core();
    if (__atomic_load_n(w->core, __ATOMIC_RELAXED) != here)
        __atomic_store_n(w->core, here, __ATOMIC_RELAXED);
    return here && __atomic_load_n(w->their_core, __ATOMIC_RELAXED) == here;
}

static int64_t *clock_of(hd_waiter *w) { return w->clock ? w->clock : &w->own; }

int hd_waiter_step(hd_waiter *w)
{
    int events = HD_WAIT_MORE;
    int64_t now;

    if (++w->n < w->spins) {
        if (shares_core(w)) {
            sched_yield();
            w->n += w->spins / 16; /* each may cost a time slice: look at the clock soon */
        } else {
            hd_pause();
        }
        return events;
    }
    if (w->start && (w->n & 7) && !w->naps) {
        sched_yield();
        return events;
    }
    now = hd_now();
    if (!w->start) {
        w->start = now;
        if (!*clock_of(w))
            *clock_of(w) = now;
        w->next_hook = now + 50 * MS;
    }
    events = HD_WAIT_CLOCK;
    if (now >= w->next_hook) {
        w->next_hook = now + 50 * MS;
        events |= HD_WAIT_HOOK;
    }
    if (now - *clock_of(w) >= w->limit)
        events |= HD_WAIT_EXPIRED;
    /* A peer that is this late is computing: leave it the core. */
    if (w->naps || now - w->start > 3 * MS) {
        struct timespec nap = {0, now - w->start > 200 * MS ? 500000
                                  : now - w->start > 3 * MS ? 50000
                                                            : 20000};
        nanosleep(&nap, NULL);
        w->n |= 7; /* the clock is read after each nap */
    } else {
        sched_yield();
    }
    return events;
}

double hd_waiter_elapsed(const hd_waiter *w)
{
    const int64_t since = w->clock ? *w->clock : w->own;
    return since ? (double)(hd_now() - since) * 1e-9 : 0.0;
}

void hd_nap_step(hd_nap *n)
{
    const int64_t now = hd_now();
    int64_t length;
    struct timespec t = {0, 0};
    if (!n->start)
        n->start = now;
    length = (now - n->start) / 16;
    t.tv_nsec = length < 20000 ? 20000 : length > 500000 ? 500000 : (long)length;
    nanosleep(&t, NULL);
}

int hd_thread_start(pthread_t *thread, void *(*runs)(void *), void *arg)
{
    sigset_t before;
    int rc;
    hd_mask_signals(&before);
    rc = pthread_create(thread, NULL, runs, arg);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return rc;
}

int hd_thread_join(pthread_t thread)
{
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += LONG_CALL;
    return pthread_timedjoin_np(thread, NULL, &until) == 0;
}

void hd_put_words(char *shared, const char *from, size_t bytes)
{
    uint64_t word;
    for (size_t at = 0; at < bytes; at += sizeof word) {
        memcpy(&word, from + at, sizeof word);
        __atomic_store_n((uint64_t *)(void *)(shared + at), word, __ATOMIC_RELEASE);
    }
}

void hd_get_words(char *to, const char *shared, size_t bytes)
{
    for (size_t at = 0; at < bytes; at += sizeof(uint64_t)) {
        const uint64_t word =
            __atomic_load_n((const uint64_t *)(const void *)(shared + at), __ATOMIC_ACQUIRE);
        memcpy(to + at, &word, sizeof word);
    }
}

void *hd_pages(size_t bytes)
{
    void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return at == MAP_FAILED ? NULL : at;
}

void hd_pages_free(void *at, size_t bytes) { munmap(at, bytes); }

uint64_t hd_hash_text(const char *s)
{
    uint64_t h = 0xcbf29ce484222325ULL; /* FNV-1a */
    for (; *s; s++)
        h = (h ^ (unsigned char)*s) * 0x100000001b3ULL;
    return h;
}

uint64_t hd_random64(void)
{
    uint64_t v = 0;
    if (getrandom(&v, sizeof v, GRND_NONBLOCK) != (ssize_t)sizeof v)
        v = hd_mix((uint64_t)hd_now(), (uint64_t)getpid());
    return v;
}

void hd_text_init(hd_text *t, char *buffer, size_t room)
{
    t->at = buffer;
    t->room = room;
    t->used = 0;
    if (room)
        buffer[0] = 0;
}

void hd_say(hd_text *t, const char *fmt, ...)
{
    va_list ap;
    int n;

    if (t->used + 1 >= t->room)
        return;
    va_start(ap, fmt);
    n = vsnprintf(t->at + t->used, t->room - t->used, fmt, ap);
    va_end(ap);
    if (n < 0)
        return;
    if ((size_t)n < t->room - t->used) {
        t->used += (size_t)n;
    } else {
        t->used = t->room - 1;
        if (t->room > 4)
            memcpy(t->at + t->room - 4, "...", 4);
    }
}

void hd_say_last(hd_text *t, const char *sentence)
{
    static const char cut[] = "...\n";
    const size_t length = strlen(sentence), mark = strlen(cut);
    if (t->used + length >= t->room && length + mark < t->room) {
        t->used = t->room - 1 - length;
        memcpy(t->at + t->used - mark, cut, mark);
    }
    hd_say(t, "%s", sentence);
}

void hd_copy_text(char *to, size_t room, const char *from)
{
    size_t n = strlen(from);
    if (n >= room)
        for (n = room - 1; n && (from[n] & 0xc0) == 0x80;)
            n--; /* the first byte that is left out would be inside a character */
    memcpy(to, from, n);
    to[n] = 0;
}
