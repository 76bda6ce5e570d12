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
#include "hd_kinds.h"
#include "hd_recorder.h"
#include "hd_types.h"

struct hd_recorder hd_rec;
int hd_rec_tsc;

static pthread_mutex_t mu = PTHREAD_MUTEX_INITIALIZER;
static uint16_t groups;        /* the last number */
static uint8_t lives[1 << 16]; /* the groups that have not been freed */
static uint32_t gone;          /* groups in the log that have */
static uint32_t sites;         /* the last number of a calling line */
static size_t line_bytes;      /* of the log, used by calling lines */
static uint64_t full_until;    /* no line can be dropped before this operation */
static uint32_t table_bytes;   /* of the log, at its beginning */

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

static size_t line_end(const char *at, size_t left)
{
    const char *next = memchr(at, '\n', left);
    return next ? (size_t)(next + 1 - at) : left;
}

/* Takes lines of text out of the log: the freed groups, or the calling lines that no bit of `used`
 * keeps. A reader at that moment misses names. Returns the bytes that it freed. With the mutex. */
static size_t make_room(hd_rec_head *h, char kind, const uint8_t *used)
{
    char *to = hd_rec.log + table_bytes, *end = hd_rec.log + h->log_used;
    const size_t before = h->log_used;
    size_t n;
    __atomic_store_n(&h->log_used, table_bytes, __ATOMIC_RELEASE);
    for (char *at = to; at < end; at += n) {
        const uint32_t id = (uint32_t)strtoul(at + 2, NULL, 10);
        n = line_end(at, (size_t)(end - at));
        if (at[0] == kind && !(kind == 'g' ? lives[(uint16_t)id] : used[id / 8] >> id % 8 & 1))
            continue;
        memmove(to, at, n);
        to += n;
    }
    __atomic_store_n(&h->log_used, (uint32_t)(to - hd_rec.log), __ATOMIC_RELEASE);
    return before - (size_t)(to - hd_rec.log);
}

/* Drops the calling lines that no operation in the ring refers to. With the mutex and the GIL. */
static void drop_lines(hd_rec_head *h)
{
    uint8_t *used = calloc(sites / 8 + 1, 1);
    size_t freed;
    if (!used)
        return;
    for (uint64_t i = 0; i <= hd_rec.mask; i++)
        if (hd_rec.ring[i].site <= sites)
            used[hd_rec.ring[i].site / 8] |= (uint8_t)(1u << hd_rec.ring[i].site % 8);
    freed = make_room(h, 's', used);
    free(used);
    line_bytes -= freed;
    /* If most are in use, not again before the ring has moved on. */
    full_until = freed < HD_REC_LINES / 4 ? hd_rec.next + hd_rec.mask / 4 : 0;
    hd_rec.drops++;
}

/* Adds a line of text; 0: no room. With the mutex. */
static int add(const hd_text *t)
{
    hd_rec_head *h = hd_rec.head;
    uint32_t used;
    if (!h || t->used >= t->room - 1)
        return 0;
    if (h->log_used + t->used > h->log_bytes && gone >= 64) {
        make_room(h, 'g', NULL);
        gone = 0;
    }
    used = h->log_used;
    if (used + t->used > h->log_bytes)
        return 0;
    memcpy(hd_rec.log + used, t->at, t->used);
    __atomic_store_n(&h->log_used, used + (uint32_t)t->used, __ATOMIC_RELEASE);
    return 1;
}

static void add_row(char table, int number, const char *text)
{
    char buffer[64];
    hd_text t;
    hd_text_init(&t, buffer, sizeof buffer);
    hd_say(&t, "%c %d %s\n", table, number, text);
    add(&t);
}

void hd_rec_tables(void)
{
    pthread_mutex_lock(&mu);
    for (int i = 0; i < HD_KIND_COUNT; i++)
        add_row('k', i, hd_kind_name(i));
#define X(NAME, text) add_row('t', HD_REC_##NAME, text);
    HD_REC_STATES(X)
#undef X
#define X(NAME, text) add_row('c', HD_##NAME, text);
    HD_CODES(X)
#undef X
    for (int i = 0; i < HD_NOPS; i++)
        add_row('o', i, hd_op_name(i));
    for (int i = 0; i < HD_NDTYPES; i++) {
        char buffer[32];
        snprintf(buffer, sizeof buffer, "%zu %s", hd_itemsize(i), hd_dtype_name(i));
        add_row('d', i, buffer);
    }
    table_bytes = hd_rec.head->log_used;
    pthread_mutex_unlock(&mu);
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

uint16_t hd_rec_group_of(int rank, int size, uint64_t uid, const char *name, const int32_t *world)
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
    hd_say(&t, "g %u %d %d %llu %s\t", next, rank, size, (unsigned long long)uid, name);
    if (world)
        say_ranks(&t, world, size);
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

uint16_t hd_rec_group(const hd_comm *c, const int32_t *world)
{
    return hd_rec_group_of(c->rank, c->size, c->uid, c->name, world);
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
    if (line_bytes + t.used > HD_REC_LINES && hd_rec.ring && hd_rec.next >= full_until)
        drop_lines(hd_rec.head);
    if (!strpbrk(function, "\t\n") && !strchr(file, '\n') && line_bytes + t.used <= HD_REC_LINES &&
        add(&t)) {
        id = ++sites;
        line_bytes += t.used;
    }
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
