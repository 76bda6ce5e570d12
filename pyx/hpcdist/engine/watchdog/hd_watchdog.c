/* The watchdog: one thread per session that keeps this rank's status fresh, notices peers that die,
 * and ends the job, with a report, when a call cannot end. It never takes the GIL. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#include "hd_abort.h"
#include "hd_base.h"
#include "hd_comm.h"
#include "hd_ft.h"
#include "hd_hang.h"
#include "hd_hydra.h"
#include "hd_job.h"
#include "hd_last_words.h"
#include "hd_late.h"
#include "hd_process.h"
#include "hd_prte.h"
#include "hd_recorder.h"
#include "hd_recorder_file.h"
#include "hd_session.h"
#include "hd_stacks.h"
#include "hd_starving.h"
#include "hd_status.h"
#include "hd_stopped.h"
#include "hd_watchdog.h"

#define TICK_MS 100
/* ns after the deadline: waits that can end by themselves get a chance to end first. */
#define GRACE 500000000
#define NAMED 16 /* ranks on other nodes that a message names */

/* ---- operations that move data ---- */

/* What the watchdog reads of an operation, while the thread that moves the data may end it and
 * begin the next. */
typedef struct moving {
    const char *api;
    uint32_t seq;
    int votes;
    int64_t until;
    double timeout;
} moving;

/* Each store is ordered after the end of the previous operation: a watchdog that reads one of the
 * new fields sees in read_moving() that the phase has changed. */
static void begin(hd_comm *c, hd_job *j, int votes)
{
    /* An operation that did not wait reads no clock. */
    const int64_t until = j->begun ? hd_job_data_until(j, hd_now()) : 0;
    __atomic_store_n(&c->transfer.api, j->api, __ATOMIC_RELEASE);
    __atomic_store_n(&c->transfer.seq, j->seq, __ATOMIC_RELEASE);
    __atomic_store_n(&c->transfer.votes, votes, __ATOMIC_RELEASE);
    __atomic_store(&c->transfer.timeout, &j->timeout, __ATOMIC_RELEASE);
    __atomic_store_n(&c->transfer.tid, hd_tid(), __ATOMIC_RELAXED);
    j->data_until = until;
    __atomic_store_n(&c->transfer.until, until, __ATOMIC_RELEASE);
    __atomic_store_n(&c->transfer.phase, c->transfer.phase + 1, __ATOMIC_RELEASE);
}

void hd_data_begin(hd_comm *c, hd_job *j) { begin(c, j, 0); }

void hd_votes_begin(hd_comm *c, hd_job *j) { begin(c, j, 1); }

void hd_data_end(hd_comm *c)
{
    __atomic_store_n(&c->transfer.phase, c->transfer.phase + 1, __ATOMIC_RELEASE);
}

/* 0: that operation has ended. */
static int read_moving(const hd_comm *c, uint64_t phase, moving *out)
{
    out->api = __atomic_load_n(&c->transfer.api, __ATOMIC_ACQUIRE);
    out->seq = __atomic_load_n(&c->transfer.seq, __ATOMIC_ACQUIRE);
    out->votes = __atomic_load_n(&c->transfer.votes, __ATOMIC_ACQUIRE);
    __atomic_load(&c->transfer.timeout, &out->timeout, __ATOMIC_ACQUIRE);
    out->until = __atomic_load_n(&c->transfer.until, __ATOMIC_ACQUIRE);
    return __atomic_load_n(&c->transfer.phase, __ATOMIC_RELAXED) == phase;
}

/* ---- ending the job ---- */

static void say_prefix(hd_text *t, const hd_session *s)
{
    char host[64] = "?";
    gethostname(host, sizeof host - 1);
    hd_say(t, "[hpcdist rank %d of %d, %s pid %d] ", s->rank, s->size, host, (int)getpid());
}

/* The members of which this node knows nothing. */
static void say_elsewhere(hd_text *t, const hd_comm *c)
{
    int n = 0;
    for (int r = 0; r < c->size; r++)
        if (c->node_slot[r] < 0 && n++ < NAMED)
            hd_say(t, "%s%d", n > 1 ? ", " : " On other nodes: rank ", r);
    if (n > NAMED)
        hd_say(t, " and %d more", n - NAMED);
    if (n)
        hd_say(t, ".");
}

/* The rank of this node that waited the longest for a core; *ns: how long. */
static int most_starved(const hd_session *s, const hd_comm *c, int64_t *ns)
{
    int most = c->rank;
    *ns = c->transfer.starved;
    for (int r = 0; s->page && r < c->size; r++)
        if (r != c->rank && c->node_slot[r] >= 0) {
            const int64_t its = hd_session_starved(s, c->node_slot[r]);
            if (its > *ns) {
                *ns = its;
                most = r;
            }
        }
    return most;
}

/* Nobody need have failed if the call would not be late but for the time in which a rank that
 * wanted to run had no core. It ends all the same: nothing tells when that rank will have one. */
static void say_cause(hd_text *t, const hd_session *s, const hd_comm *c, int64_t late)
{
    int64_t ns;
    const int rank = most_starved(s, c, &ns);
    hd_say(t, ", so a peer died, was stopped or got no core, or the network fails");
    if (ns >= late)
        hd_say(t,
               ". Rank %d there has waited for a core for %.3g s of that: this node has fewer "
               "cores than threads that want one, or its limit of processor time is reached",
               rank, (double)ns * 1e-9);
}

/* late: ns since the call's latest end. */
static void stuck(hd_session *s, const hd_comm *c, const moving *m, double after, int64_t late)
{
    char buffer[HD_TEXT];
    hd_text t;
    hd_text_init(&t, buffer, sizeof buffer);
    say_prefix(&t, s);
    hd_say(&t,
           "%s #%u of group '%s' (rank %d of %d there) has %s for %.3g s, longer than its "
           "timeout. All ranks had entered it%s",
           m->api, m->seq, c->name, c->rank, c->size,
           m->votes ? "been waiting for the other ranks' votes" : "been moving data", after,
           m->votes ? ", and one has not said whether it goes on" : "");
    say_cause(&t, s, c, late);
    hd_say(&t, "; the call cannot be cancelled: aborting the job.");
    say_elsewhere(&t, c);
    for (int i = 0; i < s->node_n && t.used < 1500; i++)
        if (i != s->slot) {
            hd_say(&t, "\n  rank %u ", s->page ? s->page[i].world_rank : 0);
            hd_session_report(s, i, &t);
        }
    hd_hang_report(s, buffer, 1);
    hd_abort(70, buffer); /* EX_SOFTWARE */
}

static void mourn(hd_session *s, int slot)
{
    char buffer[HD_TEXT];
    hd_text t;
    const uint64_t phase = __atomic_load_n(&s->page[s->slot].phase, __ATOMIC_RELAXED);
    const char *api = __atomic_load_n(&s->last_api, __ATOMIC_RELAXED);
    const uint32_t seq = __atomic_load_n(&s->last_seq, __ATOMIC_RELAXED);
    hd_text_init(&t, buffer, sizeof buffer);
    say_prefix(&t, s);
    hd_say(&t, "rank %u (pid %u) ", s->page[slot].world_rank, s->page[slot].pid);
    /* As after Ctrl-C: the signal ends Python, and no exit handler runs. */
    if (__atomic_load_n(&s->page[slot].state, __ATOMIC_ACQUIRE) == FAILING)
        hd_say(&t, "%s and ended", s->page[slot].why);
    else
        hd_say(&t, "died without leaving its process group");
    if (phase & 1)
        hd_say(&t, " while this rank is in %s #%u", api ? api : "an operation", seq);
    else if (api)
        hd_say(&t, "; this rank's last operation was %s #%u", api, seq);
    hd_say(&t, ": aborting the job");
    hd_abort(71, buffer); /* EX_OSERR */
}

/* Nobody would end this rank, nor the job for what happens to it. */
static void orphaned(hd_session *s)
{
    char buffer[HD_TEXT];
    hd_text t;
    const char *api = __atomic_load_n(&s->last_api, __ATOMIC_RELAXED);
    hd_text_init(&t, buffer, sizeof buffer);
    say_prefix(&t, s);
    hd_say(&t, "the launcher's process on this node has died");
    if (api)
        hd_say(&t, "; this rank's last operation was %s #%u", api,
               __atomic_load_n(&s->last_seq, __ATOMIC_RELAXED));
    hd_say(&t, ": aborting the job");
    hd_abort(71, buffer); /* EX_OSERR */
}

/* A rank of this node has died. One that failed ends the job, also where the others could go on:
 * what it ran into waits for them, too. */
static void lose(hd_session *s, int slot)
{
    const int ends =
        !hd_ft_on(s) || __atomic_load_n(&s->page[slot].state, __ATOMIC_ACQUIRE) == FAILING;
    /* Before waiting threads see the death: MPICH's launcher looks for dead ranks whenever a rank
     * prints, and kills the rest. So the first line has to be the one that names the rank. */
    if (ends)
        mourn(s, slot);
    __atomic_store_n(&s->dead[slot], 1, __ATOMIC_RELEASE);
    if (ends)
        return;
    hd_ft_lose(s, (int)s->page[slot].world_rank);
}

/* Deaths on other nodes, and groups that were made while the session broke. 1: it is broken. */
static int look_further(hd_session *s)
{
    if (!s->page || s->node_n < s->size || s->pidfd[s->slot] == UNSEEN)
        hd_ft_look(s);
    if (!hd_session_broken(s) && !hd_ft_told(s))
        return 0;
    hd_ft_break(s);
    return 1;
}

/* The ranks that are left make their groups again in this session: see hd_remake.h. */
static int is_remaking(const hd_session *s)
{
    return __atomic_load_n(&s->rebuilt_by, __ATOMIC_ACQUIRE) > 0;
}

/* The ranks that are left make a new session, or have one: its watchdog does the rest. Of the calls
 * that make it none can be taken back. */
static int superseded(hd_session *s, int64_t now)
{
    char buffer[HD_TEXT];
    hd_text t;
    const int64_t until = __atomic_load_n(&s->rebuilt_by, __ATOMIC_ACQUIRE);
    if (until <= 0 || now <= hd_later(until, GRACE))
        return until != 0;
    if (now < hd_stopped_end(s))
        return 1;
    hd_text_init(&t, buffer, sizeof buffer);
    say_prefix(&t, s);
    hd_say(&t, "all ranks that are left have called reconfigure, and made no new group within its "
               "timeout: one of them was stopped or got no core, or the network fails: aborting "
               "the job.");
    for (int i = 0; s->page && i < s->node_n && t.used < 1500; i++)
        if (i != s->slot) {
            hd_say(&t, "\n  rank %u ", s->page[i].world_rank);
            hd_session_report(s, i, &t);
        }
    hd_abort(70, buffer); /* EX_SOFTWARE */
    return 1;
}

/* ---- the thread ---- */

/* What the other ranks of the node see of this one. */
static void show(hd_session *s, int64_t now)
{
    entry *me = &s->page[s->slot];
    const uint64_t phase = __atomic_load_n(&me->phase, __ATOMIC_ACQUIRE);
    if (phase != me->since_phase || !me->since) { /* only this thread writes these */
        s->starving.tid = 0;
        __atomic_store_n(&me->starved, 0, __ATOMIC_RELAXED);
        __atomic_store_n(&me->since, now, __ATOMIC_RELAXED);
        __atomic_store_n(&me->since_phase, phase, __ATOMIC_RELEASE);
    } else if (phase & 1) {
        const int tid = __atomic_load_n(&s->last_tid, __ATOMIC_RELAXED);
        __atomic_store_n(&me->starved, hd_starving_look(&s->starving, tid), __ATOMIC_RELAXED);
    }
    __atomic_store_n(&me->beat, now, __ATOMIC_RELAXED);
}

static void look_at_comms(hd_session *s, int64_t now)
{
    char warning[512] = "";
    hd_text t;
    hd_text_init(&t, warning, sizeof warning);
    pthread_mutex_lock(&s->mu);
    for (hd_comm *c = s->comms; c; c = c->next) {
        uint64_t phase = __atomic_load_n(&c->transfer.phase, __ATOMIC_ACQUIRE);
        if (phase != c->transfer.seen_phase) {
            c->transfer.seen_phase = phase;
            c->transfer.since = hd_now(); /* not `now`: this thread may have lost its core since
                                           * then, and the operation may have begun meanwhile */
            c->transfer.starved = 0;
            c->transfer.starving.tid = 0;
        } else if (phase & 1) {
            moving m;
            int64_t until;
            c->transfer.starved =
                hd_starving_look(&c->transfer.starving,
                                 __atomic_load_n(&c->transfer.tid, __ATOMIC_RELAXED));
            if (!read_moving(c, phase, &m))
                continue;
            until = m.until ? m.until : hd_later(c->transfer.since, hd_ns(m.timeout));
            if (now > hd_later(until, GRACE) && now >= hd_stopped_end(s))
                stuck(s, c, &m, (double)(now - c->transfer.since) * 1e-9, now - until);
        }
    }
    hd_late_look(s, now, &t);
    pthread_mutex_unlock(&s->mu);
    if (warning[0])
        hd_tell(warning); /* not with the mutex, which operations need as well */
}

/* A dead process that its parent has not waited for: signals still reach it. */
static int is_zombie(pid_t pid)
{
    const char state = hd_process_state(pid);
    return state == 'Z' || state == 'X';
}

/* Without a pidfd, which a container or an old kernel refuses, the process id is asked. */
static int process_gone(entry *e, int fd, short revents)
{
    if (fd >= 0)
        return revents != 0;
    if (fd == UNSEEN)
        return 0;
    return kill((pid_t)e->pid, 0) ? errno == ESRCH : is_zombie((pid_t)e->pid);
}

static void *watchdog_main(void *arg)
{
    hd_session *s = arg;
    const int n = s->page ? s->node_n : 0;
    struct pollfd *fds = calloc((size_t)n + 1, sizeof *fds);

    prctl(PR_SET_NAME, "hpcdist-watch");
    hd_now_watched(1);
    for (;;) {
        int64_t now;
        if (fds) {
            fds[n] = (struct pollfd){s->wake[0], POLLIN, 0};
            for (int i = 0; i < n; i++)
                fds[i] = (struct pollfd){s->dead[i] ? -1 : s->pidfd[i], POLLIN, 0};
            poll(fds, (nfds_t)n + 1, TICK_MS);
        } else {
            struct timespec ts = {0, TICK_MS * 1000000};
            nanosleep(&ts, NULL);
        }
        if (__atomic_load_n(&s->stop, __ATOMIC_ACQUIRE))
            break;
        now = hd_now();
        if (s->page)
            show(s, hd_uptime());
        for (int i = 0; i < n && fds; i++) {
            if (i == s->slot)
                continue;
            if (s->dead[i] || !process_gone(&s->page[i], s->pidfd[i], fds[i].revents))
                continue;
            /* At once: a launcher ends the job too, but names no operation, and MPICH's takes a
             * rank that vanished with status 0 for success unless another rank reports otherwise
             * first. */
            if (__atomic_load_n(&s->page[i].state, __ATOMIC_ACQUIRE) != LEAVING &&
                __atomic_load_n(&s->page[s->slot].state, __ATOMIC_ACQUIRE) == RUNNING)
                lose(s, i);
            else
                __atomic_store_n(&s->dead[i], 1, __ATOMIC_RELEASE);
        }
        if (hd_hydra_gone() || (hd_ft_on(s) && hd_prte_gone()))
            orphaned(s);
        hd_stopped_look(s);
        if (hd_ft_on(s) && (look_further(s) | is_remaking(s)) && superseded(s, now))
            continue;
        hd_rec_beat();
        hd_rec_dump_failed();
        hd_stacks_answer();
        hd_hang_look(s);
        look_at_comms(s, now);
    }
    hd_now_watched(-1);
    free(fds);
    return NULL;
}

int hd_watchdog_start(hd_session *s)
{
    if (pipe2(s->wake, O_CLOEXEC | O_NONBLOCK))
        return 0;
    s->watching = hd_thread_start(&s->watchdog, watchdog_main, s) == 0;
    return s->watching;
}

void hd_watchdog_stop(hd_session *s)
{
    if (s->watching) {
        __atomic_store_n(&s->stop, 1, __ATOMIC_RELEASE);
        (void)!write(s->wake[1], "x", 1); /* if it fails, the next tick sees the flag */
        pthread_join(s->watchdog, NULL);
    }
    if (s->wake[0] >= 0)
        close(s->wake[0]);
    if (s->wake[1] >= 0)
        close(s->wake[1]);
}
