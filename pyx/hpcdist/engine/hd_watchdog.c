/* The watchdog: one thread a session that keeps this rank's status fresh, notices peers that die, and ends
 * the job, with a report, when a call cannot end. It never takes the GIL. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#include "hd_session.h"

#define TICK_MS 100
#define GRACE 500000000   /* ns after the deadline: waits that can end by themselves go first */
#define STOPPED 1000000000 /* ns: this thread did not run for so long, the process was stopped */

static void say_prefix(hd_text *t, const hd_session *s)
{
    char host[64] = "?";
    gethostname(host, sizeof host - 1);
    hd_say(t, "[hpcdist rank %d of %d, %s pid %d] ", s->rank, s->size, host, (int)getpid());
}

static void stuck(hd_session *s, hd_comm *c, double after)
{
    char buffer[HD_TEXT];
    hd_text t;
    hd_text_init(&t, buffer, sizeof buffer);
    say_prefix(&t, s);
    hd_say(&t, "%s #%u of group '%s' (rank %d of %d there) has been moving data for %.3g s, longer than its "
               "timeout. All ranks had entered it, so a peer died, was stopped, or the network fails; the "
               "call cannot be cancelled: aborting the job.",
           c->cur_api ? c->cur_api : "an operation", c->cur_seq, c->name, c->rank, c->size, after);
    for (int i = 0; i < s->node_n && t.used < 1500; i++)
        if (i != s->slot) {
            hd_say(&t, "\n  rank %u ", s->page ? s->page[i].world_rank : 0);
            hd_session_report(s, i, &t);
        }
    hd_abort(70, buffer); /* EX_SOFTWARE */
}

static void mourn(hd_session *s, int slot)
{
    char buffer[HD_TEXT];
    hd_text t;
    entry *me = &s->page[s->slot];
    hd_text_init(&t, buffer, sizeof buffer);
    say_prefix(&t, s);
    hd_say(&t, "rank %u (pid %u) ", s->page[slot].world_rank, s->page[slot].pid);
    if (s->page[slot].state == FAILING) /* as after Ctrl-C: Python ends by the signal, and nothing at exit runs */
        hd_say(&t, "%.159s and ended", s->page[slot].why);
    else
        hd_say(&t, "died without leaving its process group");
    if (me->phase & 1)
        hd_say(&t, " while this rank is in %s #%u", s->last_api ? s->last_api : "an operation", s->last_seq);
    else if (me->phase)
        hd_say(&t, "; this rank's last operation was %s #%u", s->last_api ? s->last_api : "?", s->last_seq);
    hd_say(&t, ": aborting the job");
    hd_abort(71, buffer); /* EX_OSERR */
}

/* slept: ns for which this process was stopped before this look. */
static void look_at_comms(hd_session *s, int64_t now, int64_t slept)
{
    pthread_mutex_lock(&s->mu);
    for (hd_comm *c = s->comms; c; c = c->next) {
        uint64_t phase = __atomic_load_n(&c->data_phase, __ATOMIC_ACQUIRE);
        if (phase != c->wd_phase) {
            c->wd_phase = phase;
            c->wd_since = now;
            c->wd_slept = 0;
        } else if (phase & 1) {
            int64_t until = c->cur_until ? c->cur_until : hd_later(c->wd_since, hd_ns(c->cur_timeout));
            c->wd_slept += slept; /* a stop of the whole job is no fault of its ranks */
            if (now > hd_later(until, GRACE + c->wd_slept))
                stuck(s, c, (double)(now - c->wd_since) * 1e-9);
        }
    }
    pthread_mutex_unlock(&s->mu);
}

static int process_gone(entry *e, int fd, short revents)
{
    if (fd >= 0)
        return revents != 0;
    if (fd == UNSEEN)
        return 0;
    return kill((pid_t)e->pid, 0) != 0 && errno == ESRCH;
}

static void *watchdog_main(void *arg)
{
    hd_session *s = arg;
    const int n = s->page ? s->node_n : 0;
    struct pollfd *fds = calloc((size_t)n + 1, sizeof *fds);
    int64_t last = 0; /* ns, when it looked */

    prctl(PR_SET_NAME, "hpcdist-watch");
    for (;;) {
        int64_t now, slept;
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
        slept = last && now - last > STOPPED ? now - last : 0;
        last = now;
        if (s->page) {
            entry *me = &s->page[s->slot];
            uint64_t phase = __atomic_load_n(&me->phase, __ATOMIC_ACQUIRE);
            if (phase != me->since_phase || !me->since) {
                me->since = now;
                me->since_phase = phase;
            }
            me->beat = now;
        }
        for (int i = 0; i < n && fds; i++) {
            if (i == s->slot)
                continue;
            if (s->dead[i] || !process_gone(&s->page[i], s->pidfd[i], fds[i].revents))
                continue;
            __atomic_store_n(&s->dead[i], 1, __ATOMIC_RELEASE);
            /* At once: a launcher ends the job too, but names no operation, and MPICH's takes a rank that
             * vanished with status 0 for success unless somebody says otherwise first. */
            if (__atomic_load_n(&s->page[i].state, __ATOMIC_ACQUIRE) != LEAVING &&
                __atomic_load_n(&s->page[s->slot].state, __ATOMIC_ACQUIRE) == RUNNING)
                mourn(s, i);
        }
        look_at_comms(s, now, slept);
    }
    free(fds);
    return NULL;
}

void hd_watchdog_start(hd_session *s)
{
    sigset_t all, old;
    s->wake[0] = s->wake[1] = -1;
    if (pipe2(s->wake, O_CLOEXEC | O_NONBLOCK))
        return;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old); /* Python's signals belong to the main thread */
    s->watching = pthread_create(&s->watchdog, NULL, watchdog_main, s) == 0;
    pthread_sigmask(SIG_SETMASK, &old, NULL);
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
