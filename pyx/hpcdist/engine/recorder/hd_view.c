/* Another process's recorder file in words: see hd_view.h. Its process may write to it meanwhile,
 * or have died. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "hd_base.h"
#include "hd_recorder.h"
#include "hd_recorder_file.h"
#include "hd_types.h"
#include "hd_view.h"

#define MOST 6   /* operations in progress that are listed */
#define FRAMES 3 /* of the main thread */

static int fits(const hd_rec_head *h, size_t bytes)
{
    return memcmp(h->magic, "hpcdrec\n", 8) == 0 && h->version == HD_REC_VERSION &&
           h->record_bytes == sizeof(hd_record) && h->records && h->head_bytes >= sizeof *h &&
           h->log_used <= h->log_bytes && h->stack_used <= h->stack_bytes &&
           (uint64_t)h->head_bytes + h->log_bytes + h->stack_bytes +
                   (uint64_t)h->records * sizeof(hd_record) <=
               bytes;
}

int hd_view_open(hd_view *v, const char *path)
{
    struct stat st;
    void *at = MAP_FAILED;
    *v = (hd_view){0};
    if (path[0] && strcmp(path, hd_rec_path()) == 0) {
        v->head = hd_rec.head;
    } else if (path[0]) {
        const int fd = open(path, O_RDWR | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK);
        if (fd >= 0 && fstat(fd, &st) == 0 && S_ISREG(st.st_mode) &&
            st.st_size >= (off_t)sizeof(hd_rec_head))
            at = mmap(NULL, (size_t)st.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        if (fd >= 0)
            close(fd);
        if (at != MAP_FAILED) {
            v->head = at;
            v->bytes = (size_t)st.st_size;
        }
    }
    if (!v->head)
        return 0;
    if (v->bytes && !fits(v->head, v->bytes)) {
        hd_view_close(v);
        return 0;
    }
    v->log = (const char *)v->head + v->head->head_bytes;
    v->stacks = v->log + v->head->log_bytes;
    v->ring = (const hd_record *)(v->stacks + v->head->stack_bytes);
    return 1;
}

void hd_view_close(hd_view *v)
{
    if (v->bytes)
        munmap(v->head, v->bytes);
    v->head = NULL;
}

/* ---- names ---- */

/* The line of the log that begins with this letter and number: its rest, and how long that is. */
static const char *look_up(const hd_view *v, char kind, unsigned number, int *length)
{
    const char *at = v->log, *end = at + __atomic_load_n(&v->head->log_used, __ATOMIC_ACQUIRE);
    while (at < end) {
        const char *stop = memchr(at, '\n', (size_t)(end - at));
        char *rest;
        if (!stop)
            break;
        if (at[0] == kind && strtoul(at + 2, &rest, 10) == number) {
            *length = (int)(stop - rest - 1);
            return rest + 1;
        }
        at = stop + 1;
    }
    *length = 1;
    return "?";
}

static void say_group(const hd_view *v, unsigned number, hd_text *t)
{
    int length;
    const char *at = look_up(v, 'g', number, &length), *end = at + length;
    for (int words = 0; words < 3 && at < end; at++)
        words += *at == ' ';
    if (at < end && memchr(at, '\t', (size_t)(end - at)))
        end = memchr(at, '\t', (size_t)(end - at));
    hd_say(t, " of group '%.*s'", (int)(end - at), at);
}

/* "/home/me/train.py" as "me/train.py". */
static void say_line(const char *file, int length, int line, const char *function, int letters,
                     hd_text *t)
{
    const char *from = file + length;
    for (int slashes = 0; from > file; from--)
        if (from[-1] == '/' && ++slashes == 2)
            break;
    hd_say(t, "%.*s:%d in %.*s", (int)(file + length - from), from, line, letters, function);
}

static void say_site(const hd_view *v, unsigned number, hd_text *t)
{
    int length;
    const char *at = look_up(v, 's', number, &length), *tab;
    char *function;
    int line;
    if (!number || !(tab = memchr(at, '\t', (size_t)length)))
        return;
    line = (int)strtol(at, &function, 10);
    hd_say(t, ", called at ");
    say_line(tab + 1, (int)(at + length - tab - 1), line, function + 1, (int)(tab - function - 1),
             t);
}

/* ---- operations ---- */

void hd_view_say(const hd_view *v, const hd_record *r, hd_text *t)
{
    int length;
    const char *name = look_up(v, 'n', r->name, &length);
    hd_say(t, "%.*s", length, name);
    if (r->kind == HD_SEND || r->kind == HD_RECV) {
        if (r->peer < 0)
            hd_say(t, " from any rank");
        else
            hd_say(t, " %s rank %d", r->kind == HD_SEND ? "to" : "from", r->peer);
        hd_say(t, ", tag %d,", r->tag);
    } else {
        hd_say(t, " #%u", r->seq);
    }
    say_group(v, r->group, t);
    if (r->dtype >= 0)
        hd_say(t, ", %lld elements of %s", (long long)r->count, hd_dtype_name(r->dtype));
    say_site(v, r->site, t);
}

/* A copy of a record that is not being written to. */
static int copy(const hd_record *from, hd_record *to)
{
    const uint64_t id = __atomic_load_n(&from->id, __ATOMIC_ACQUIRE);
    *to = *from;
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    return id && __atomic_load_n(&from->id, __ATOMIC_RELAXED) == id;
}

static int goes_on(const hd_record *r)
{
    return r->state == HD_REC_QUEUED || r->state == HD_REC_RUNNING;
}

static double seconds_since(const hd_rec_head *h, int64_t ticks)
{
    const hd_rec_clock *a = &h->first,
                       *b = &h->last[__atomic_load_n(&h->turn, __ATOMIC_ACQUIRE) & 1];
    const double rate =
        b->ticks > a->ticks ? (double)(b->mono - a->mono) / (double)(b->ticks - a->ticks) : 1.0;
    return ((double)(hd_uptime() - b->mono) + rate * (double)(b->ticks - ticks)) * 1e-9;
}

void hd_view_operations(const hd_view *v, hd_text *t)
{
    hd_record open[MOST], last = {0}, r;
    int n = 0;
    for (uint32_t i = 0; i < v->head->records; i++) {
        if (!copy(&v->ring[i], &r))
            continue;
        if (r.id > last.id)
            last = r;
        if (goes_on(&r)) {
            int at = n < MOST ? n : MOST - 1; /* the oldest ones, in order */
            if (n >= MOST && open[at].id < r.id)
                continue;
            for (; at > 0 && open[at - 1].id > r.id; at--)
                open[at] = open[at - 1];
            open[at] = r;
            n += n < MOST;
        }
    }
    for (int i = 0; i < n; i++) {
        hd_say(t, "  %s ", open[i].state == HD_REC_QUEUED ? "waits for its turn:" : "is in");
        hd_view_say(v, &open[i], t);
        hd_say(t, ", for %.1f s\n", seconds_since(v->head, open[i].call));
    }
    if (last.id && !goes_on(&last)) {
        hd_say(t, "  last %s: ", last.state == HD_REC_FAILED ? "one, which failed" : "one");
        hd_view_say(v, &last, t);
        hd_say(t, ", %.1f s ago\n", seconds_since(v->head, last.call));
    }
}

/* ---- one group's ---- */

void hd_view_name(const hd_view *v, unsigned number, char *out, size_t room)
{
    int length;
    const char *at = look_up(v, 'n', number, &length);
    snprintf(out, room, "%.*s", length, at);
}

unsigned hd_view_group(const hd_view *v, uint64_t uid)
{
    const char *at = v->log, *end = at + __atomic_load_n(&v->head->log_used, __ATOMIC_ACQUIRE);
    unsigned found = 0; /* the last one: an earlier one may be of a group that is gone */
    while (at < end) {
        const char *stop = memchr(at, '\n', (size_t)(end - at));
        char *rest;
        if (!stop)
            break;
        if (at[0] == 'g') {
            const unsigned number = (unsigned)strtoul(at + 2, &rest, 10);
            (void)strtol(rest, &rest, 10); /* rank and size */
            (void)strtol(rest, &rest, 10);
            if (strtoull(rest, &rest, 10) == uid)
                found = number;
        }
        at = stop + 1;
    }
    return found;
}

int hd_view_find(const hd_view *v, unsigned group, uint32_t seq, hd_record *at, hd_record *last)
{
    int found = 0;
    hd_record r;
    memset(last, 0, sizeof *last);
    for (uint32_t i = 0; group && i < v->head->records; i++) {
        if (!copy(&v->ring[i], &r) || r.group != group || r.kind == HD_SEND || r.kind == HD_RECV)
            continue;
        if (r.id > last->id)
            *last = r;
        if (r.seq == seq) {
            *at = r;
            found = 1;
        }
    }
    return found;
}

int hd_view_next(const hd_view *v, unsigned group, uint64_t after, uint64_t id, hd_record *at)
{
    hd_record r;
    at->id = 0;
    for (uint32_t i = 0; i < v->head->records; i++)
        if (copy(&v->ring[i], &r) && r.group == group && r.id > after &&
            (r.id == id || (r.id < id && goes_on(&r) && r.kind != HD_SEND && r.kind != HD_RECV)) &&
            (!at->id || r.id < at->id))
            *at = r;
    return at->id != 0;
}

/* ---- stacks ---- */

/* faulthandler writes the main thread last. */
static char *main_thread(char *text)
{
    char *found = NULL;
    for (char *at = text; (at = strstr(at, "hread 0x")); at++)
        found = at;
    return found;
}

/* Whether a file is of this library: the program's folder may have the same name. */
static int of_library(const char *file)
{
    static const char name[] = "/hpcdist/", one[] = "recordings/rows.py";
    char path[4096];
    for (const char *at = file; (at = strstr(at, name)); at++) {
        const int n = (int)(at - file) + (int)sizeof name - 1;
        if ((size_t)snprintf(path, sizeof path, "%.*s%s", n, file, one) < sizeof path &&
            access(path, F_OK) == 0)
            return 1;
    }
    return 0;
}

void hd_view_where(const hd_view *v, hd_text *t)
{
    static const char before[] = "  File \"", line[] = "\", line ";
    const uint32_t used = __atomic_load_n(&v->head->stack_used, __ATOMIC_ACQUIRE);
    char *text = strndup(v->stacks, used), *at = text ? main_thread(text) : NULL;
    int n = 0;
    while (at && n < FRAMES && (at = strstr(at, before))) {
        const char *file = at + sizeof before - 1;
        char *quote = strstr(file, line), *in = quote ? strstr(quote, " in ") : NULL;
        char *end = in ? strchr(in, '\n') : NULL;
        if (!end)
            break;
        at = end;
        *quote = 0;
        if (!n && of_library(file))
            continue; /* the wait itself */
        hd_say(t, "%s", n++ ? " < " : "");
        say_line(file, (int)(quote - file), atoi(quote + sizeof line - 1), in + 4,
                 (int)(end - in - 4), t);
    }
    free(text);
}
