/* The hang report: see hd_hang.h. */
#define _GNU_SOURCE
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "hd_base.h"
#include "hd_comm.h"
#include "hd_hang.h"
#include "hd_recorder.h"
#include "hd_recorder_file.h"
#include "hd_session.h"
#include "hd_stacks.h"
#include "hd_status.h"
#include "hd_view.h"

#define AHEAD 0.6            /* seconds before the end of a wait at which it asks */
#define AGAIN 2000000000LL   /* ns: an answer that old is asked for again */
#define APART 20000000000LL  /* ns between two reports of a node */
#define PATIENCE 700000000LL /* ns to wait for stacks */
#define RECENT 5000000000LL  /* ns: older stacks are of something else */
#define SILENT 1500000000LL  /* ns without a heartbeat */
#define ROOM (1 << 20)       /* bytes of a report */

static int wish = 1, signalled;

void hd_hang_wish(int on) { wish = on; }

static void on_signal(int number)
{
    (void)number;
    __atomic_store_n(&signalled, 1, __ATOMIC_RELEASE);
}

void hd_hang_on_signal(int number)
{
    struct sigaction now, ours = {.sa_handler = on_signal, .sa_flags = SA_RESTART | SA_ONSTACK};
    if (wish && sigaction(number, NULL, &now) == 0 && now.sa_handler == SIG_DFL)
        sigaction(number, &ours, NULL);
}

void hd_hang_look(hd_session *s)
{
    if (__atomic_exchange_n(&signalled, 0, __ATOMIC_ACQ_REL))
        hd_hang_report(s, "a signal asks for it", 1);
}

static int ranks_here(const hd_session *s) { return s->page ? s->node_n : 1; }

static int open_view(const hd_session *s, int i, hd_view *v)
{
    return hd_view_open(v, s->page ? s->page[i].record : hd_rec_path());
}

/* The questions that are open then. */
static void ask(hd_session *s, int native)
{
    static int64_t last;
    const int64_t now = hd_now();
    hd_view v;
    if (last && now - last < AGAIN && !native)
        return;
    last = now;
    for (int i = 0; i < ranks_here(s); i++)
        if (open_view(s, i, &v)) {
            /* One question at a time: ranks that ask together get one answer. */
            const uint32_t answered = __atomic_load_n(&v.head->answered, __ATOMIC_ACQUIRE);
            if (native)
                __atomic_store_n(&v.head->native, 1, __ATOMIC_RELEASE);
            __atomic_store_n(&v.head->ask, answered + 1, __ATOMIC_RELEASE);
            hd_view_close(&v);
        }
}

void hd_hang_expect(hd_session *s, double left)
{
    if (wish && left < AHEAD)
        ask(s, 0);
}

/* Whether its stacks are of this hang. */
static int recent(const hd_view *v)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec - v->head->stack_real < RECENT;
}

void hd_hang_say_where(hd_session *s, int slot, hd_text *t)
{
    char buffer[512];
    hd_text where;
    hd_view v;
    if (!wish || !s->page || slot < 0 || !open_view(s, slot, &v))
        return;
    hd_text_init(&where, buffer, sizeof buffer);
    if (recent(&v))
        hd_view_where(&v, &where);
    if (where.used)
        hd_say(t, ", now at %s", buffer);
    hd_view_close(&v);
}

/* ---- the report ---- */

static int answered(const hd_session *s)
{
    hd_view v;
    int all = 1;
    for (int i = 0; i < ranks_here(s); i++) {
        if (s->page && (hd_session_gone((hd_session *)s, i) || hd_session_silent(s, i, SILENT)))
            continue; /* it is stopped, and will not answer */
        if (open_view(s, i, &v)) {
            all &= __atomic_load_n(&v.head->ask, __ATOMIC_ACQUIRE) ==
                   __atomic_load_n(&v.head->answered, __ATOMIC_ACQUIRE);
            hd_view_close(&v);
        }
    }
    return all;
}

static void say_rank(hd_session *s, int i, hd_text *t)
{
    uint32_t used;
    hd_view v;
    hd_say(t, "rank %u", s->page ? s->page[i].world_rank : (uint32_t)s->rank);
    if (s->page && i != s->slot) {
        hd_say(t, " ");
        hd_session_report(s, i, t);
    } else {
        hd_say(t, " writes this (pid %d)", (int)getpid());
    }
    hd_say(t, "\n");
    if (!open_view(s, i, &v)) {
        hd_say(t, "  (its flight recorder cannot be read)\n");
        return;
    }
    hd_view_operations(&v, t);
    used = __atomic_load_n(&v.head->stack_used, __ATOMIC_ACQUIRE);
    if (used && recent(&v))
        hd_say(t, "%.*s", (int)used, v.stacks);
    hd_view_close(&v);
}

static void write_all(const char *at, size_t left)
{
    while (left) {
        struct pollfd room = {STDERR_FILENO, POLLOUT, 0};
        ssize_t n;
        if (poll(&room, 1, 500) != 1 ||
            (n = write(STDERR_FILENO, at, left < 4096 ? left : 4096)) <= 0)
            return; /* no reader reads it */
        at += n;
        left -= (size_t)n;
    }
}

/* Whether this rank is the one that writes. */
static int first_to_report(hd_session *s)
{
    static int64_t alone;
    int64_t *at = s->page ? &s->page[0].reported : &alone,
            before = __atomic_load_n(at, __ATOMIC_ACQUIRE);
    const int64_t now = hd_uptime();
    return (!before || now - before > APART) &&
           __atomic_compare_exchange_n(at, &before, now, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
}

void hd_hang_report(hd_session *s, const char *why, int watchdog)
{
    const int64_t until = hd_now() + PATIENCE;
    char *buffer, host[64] = "?";
    hd_text t;
    if (!wish || !hd_rec.head || !first_to_report(s) || !(buffer = malloc(ROOM)))
        return;
    ask(s, watchdog);
    while (!answered(s) && hd_now() < until) {
        const struct timespec nap = {0, 5000000};
        if (watchdog)
            hd_stacks_answer();
        nanosleep(&nap, NULL);
    }
    gethostname(host, sizeof host - 1);
    hd_text_init(&t, buffer, ROOM);
    hd_say(&t, "[hpcdist rank %d of %d] hang report of the %d rank%s on %s (job %08x): %.*s\n",
           s->rank, s->size, ranks_here(s), ranks_here(s) > 1 ? "s" : "", host,
           (unsigned)(hd_rec.head->job >> 32), (int)strcspn(why, "\n"), why);
    for (int i = 0; i < ranks_here(s); i++)
        say_rank(s, i, &t);
    hd_say(&t, "[hpcdist] end of the report");
    if (hd_rec_path()[0])
        hd_say(&t, ". See also: python -m hpcdist analyze %.*s --job %08x",
               (int)(strrchr(hd_rec_path(), '/') - hd_rec_path()), hd_rec_path(),
               (unsigned)(hd_rec.head->job >> 32));
    hd_say(&t, "\n");
    write_all(buffer, t.used);
    free(buffer);
}
