/* The flight recorder's clock, and what its records refer to: see hd_recorder.h. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "hd_base.h"
#include "hd_comm.h"
#include "hd_job.h"
#include "hd_recorder.h"

struct hd_recorder hd_rec;
int hd_rec_tsc;

static pthread_mutex_t mu = PTHREAD_MUTEX_INITIALIZER;
static uint16_t groups;        /* the last number */
static uint8_t lives[1 << 16]; /* the groups that have not been freed */
static uint32_t gone;          /* groups in the log that have */
static uint32_t sites;

/* ---- the clock ---- */

static int64_t ns_of(clockid_t id)
{
    struct timespec t;
    clock_gettime(id, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

int64_t hd_rec_slow_ticks(void) { return ns_of(CLOCK_MONOTONIC); }

void hd_rec_clock_start(void)
{
#if defined(__x86_64__)
    unsigned a, b, c, d;
    /* It runs evenly, whatever the core's frequency and sleep. */
    hd_rec_tsc = __get_cpuid(0x80000007, &a, &b, &c, &d) && (d & (1u << 8));
#endif
}

/* The three readings belong together: of some tries the one that took least. */
void hd_rec_clock_now(hd_rec_clock *out)
{
    int64_t least = INT64_MAX;
    for (int i = 0; i < 3; i++) {
        const int64_t before = hd_rec_ticks(), mono = ns_of(CLOCK_MONOTONIC),
                      real = ns_of(CLOCK_REALTIME), after = hd_rec_ticks();
        if (after - before >= least)
            continue;
        least = after - before;
        *out = (hd_rec_clock){before + least / 2, mono, real};
    }
}

void hd_rec_beat(void)
{
    hd_rec_head *h = hd_rec.head;
    uint32_t next;
    if (!h)
        return;
    next = __atomic_load_n(&h->turn, __ATOMIC_RELAXED) + 1;
    hd_rec_clock_now(&h->last[next & 1]);
    __atomic_store_n(&h->turn, next, __ATOMIC_RELEASE);
}

/* ---- names, groups, lines ---- */

/* Takes the freed groups out of the log. Who reads it just then misses names. With the mutex. */
static void make_room(hd_rec_head *h)
{
    char *to = hd_rec.log, *end = hd_rec.log + h->log_used, *next;
    __atomic_store_n(&h->log_used, 0, __ATOMIC_RELEASE);
    for (char *at = to; at < end; at = next) {
        const size_t left = (size_t)(end - at);
        next = memchr(at, '\n', left);
        next = next ? next + 1 : end;
        if (at[0] == 'g' && !lives[(uint16_t)strtoul(at + 2, NULL, 10)])
            continue;
        memmove(to, at, (size_t)(next - at));
        to += next - at;
    }
    gone = 0;
    __atomic_store_n(&h->log_used, (uint32_t)(to - hd_rec.log), __ATOMIC_RELEASE);
}

/* Adds a line of text; 0: no room. With the mutex. */
static int add(const hd_text *t)
{
    hd_rec_head *h = hd_rec.head;
    uint32_t used;
    if (!h || t->used >= t->room - 1)
        return 0;
    if (h->log_used + t->used > h->log_bytes && gone >= 64)
        make_room(h);
    used = h->log_used;
    if (used + t->used > h->log_bytes)
        return 0;
    memcpy(hd_rec.log + used, t->at, t->used);
    __atomic_store_n(&h->log_used, used + (uint32_t)t->used, __ATOMIC_RELEASE);
    return 1;
}

uint16_t hd_rec_name(const char *api)
{
    static const char *known[256];
    static const hd_rec_head *of;
    char buffer[HD_NAME + 16];
    uint16_t id = 0;
    hd_text t;
    pthread_mutex_lock(&mu);
    if (of != hd_rec.head) {
        memset(known, 0, sizeof known);
        of = hd_rec.head;
    }
    for (uint16_t i = 1; i < 256 && !id && hd_rec.head; i++) {
        if (known[i]) {
            id = strcmp(known[i], api) == 0 ? i : 0;
            continue;
        }
        hd_text_init(&t, buffer, sizeof buffer);
        hd_say(&t, "n %u %s\n", i, api);
        if (!add(&t))
            break;
        known[i] = api;
        id = i;
    }
    pthread_mutex_unlock(&mu);
    return id;
}

/* "0-7 16-64:8": ranks in a row, or with a step. */
static void say_ranks(hd_text *t, const int32_t *ranks, int n)
{
    for (int i = 0, k; i < n; i = k) {
        const int step = i + 1 < n ? ranks[i + 1] - ranks[i] : 1;
        for (k = i + 1; k < n && ranks[k] - ranks[k - 1] == step; k++)
            ;
        if (k - i == 2) /* two of them are no row */
            k = i + 1;
        hd_say(t, " %d", ranks[i]);
        if (k - i > 1)
            hd_say(t, step == 1 ? "-%d" : "-%d:%d", ranks[k - 1], step);
    }
}

uint16_t hd_rec_group(const hd_comm *c, const int32_t *world)
{
    char buffer[4096];
    uint16_t id = 0, next;
    hd_text t;
    pthread_mutex_lock(&mu);
    next = groups;
    do
        next++;
    while ((!next || lives[next]) && next != groups);
    hd_text_init(&t, buffer, sizeof buffer - 1);
    hd_say(&t, "g %u %d %d %llu %s\t", next, c->rank, c->size, (unsigned long long)c->uid, c->name);
    if (world)
        say_ranks(&t, world, c->size);
    if (t.used >= t.room - 1) /* cut: the list is too long */
        t.used = (size_t)(strchr(buffer, '\t') + 1 - buffer);
    buffer[t.used++] = '\n';
    if (next != groups && add(&t)) {
        id = groups = next;
        lives[id] = 1;
    }
    pthread_mutex_unlock(&mu);
    return id;
}

void hd_rec_forget(uint16_t group)
{
    pthread_mutex_lock(&mu);
    gone += lives[group];
    lives[group] = 0;
    pthread_mutex_unlock(&mu);
}

uint32_t hd_rec_site(int line, const char *function, const char *file)
{
    char buffer[1024];
    uint32_t id = 0;
    hd_text t;
    pthread_mutex_lock(&mu);
    hd_text_init(&t, buffer, sizeof buffer);
    hd_say(&t, "s %u %d %s\t%s\n", sites + 1, line, function, file);
    if (!strpbrk(function, "\t\n") && !strchr(file, '\n') && add(&t))
        id = ++sites;
    pthread_mutex_unlock(&mu);
    return id;
}

/* ---- records ---- */

void hd_rec_begin_wide(hd_record *r, const hd_job *j)
{
    r->start = r->agreed = r->in_n = r->out_n = 0;
    for (int i = 0; i < j->nin; i++)
        r->in_n += j->in[i].n;
    for (int i = 0; i < j->nout; i++)
        r->out_n += j->out[i].n;
    for (int i = 0; i < 4; i++)
        r->dims[i] = i < j->ndim ? j->dims[i] : 0;
}
