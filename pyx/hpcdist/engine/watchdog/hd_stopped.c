/* Processes of this node that are stopped: see hd_stopped.h. */
#define _GNU_SOURCE
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "hd_base.h"
#include "hd_ft.h"
#include "hd_job.h"
#include "hd_last_words.h"
#include "hd_process.h"
#include "hd_session.h"
#include "hd_status.h"
#include "hd_stopped.h"
#include "hd_threads.h"

#ifndef SYS_pidfd_send_signal
#define SYS_pidfd_send_signal 424
#endif

#define SILENT 300000000LL /* ns without a heartbeat, after which its state is read */
#define LONG 1000000000LL  /* ns: a job that is stopped and continued as a whole takes less */
#define DIES 2000000000LL  /* ns in which the end of a process becomes known */
#define FAR 700000000LL    /* ns in which that of one on another node does */
#define AGAIN 5000000000LL /* ns: a wait for one on another node is not repeated so soon */

static int is_stopped(const hd_session *s, int slot)
{
    return s->pidfd[slot] != UNSEEN && hd_session_silent(s, slot, SILENT) &&
           hd_process_state((pid_t)s->page[slot].pid) == 'T';
}

void hd_stopped_look(hd_session *s)
{
    const int64_t now = hd_now();
    for (int i = 0; hd_ft_on(s) && s->stopped && i < s->node_n; i++) {
        const int64_t since = __atomic_load_n(&s->stopped[i], __ATOMIC_RELAXED);
        const int here = i != s->slot && !__atomic_load_n(&s->dead[i], __ATOMIC_ACQUIRE);
        int64_t then = 0;
        if (here && is_stopped(s, i))
            then = since ? since : now;
        if (then != since)
            __atomic_store_n(&s->stopped[i], then, __ATOMIC_RELAXED);
    }
}

static void end(hd_session *s, int slot, int64_t since)
{
    char line[256];
    hd_text t;
    entry *e = &s->page[slot];
    /* First: whoever sees it dead asks whether it was this. */
    const int told = (int)__atomic_exchange_n(&e->given_up, 1, __ATOMIC_ACQ_REL);
    if (s->pidfd[slot] >= 0)
        (void)syscall(SYS_pidfd_send_signal, s->pidfd[slot], SIGKILL, NULL, 0);
    else
        (void)kill((pid_t)e->pid, SIGKILL);
    if (told)
        return;
    hd_text_init(&t, line, sizeof line);
    hd_say(&t,
           "[hpcdist rank %d of %d] rank %u (pid %u) has been stopped for %.1f s, and the others "
           "have waited for it as long as they may: it is ended, and they go on without it",
           s->rank, s->size, e->world_rank, e->pid, (double)(hd_now() - since) * 1e-9);
    hd_tell(line);
}

/* On another node one may have been ended. Not for each of many timeouts in a row. */
static int asks_afar(const hd_session *s, int64_t now, int64_t patient)
{
    return s->node_n < s->size && (!patient || now - patient > AGAIN);
}

int64_t hd_stopped_end(hd_session *s)
{
    int ended = 0;
    int64_t now = hd_now();
    if (!hd_ft_on(s) || !s->stopped)
        return 0;
    for (int i = 0; i < s->node_n; i++) {
        const int64_t since = __atomic_load_n(&s->stopped[i], __ATOMIC_RELAXED);
        if (since && now - since >= LONG)
            end(s, i, since);
        ended += (int)__atomic_load_n(&s->page[i].given_up, __ATOMIC_ACQUIRE);
    }
    now = hd_now(); /* a line may have been written */
    if (__atomic_exchange_n(&s->ended, ended, __ATOMIC_ACQ_REL) != ended)
        __atomic_store_n(&s->patient, hd_later(now, DIES), __ATOMIC_RELEASE);
    else if (asks_afar(s, now, __atomic_load_n(&s->patient, __ATOMIC_ACQUIRE)))
        __atomic_store_n(&s->patient, hd_later(now, FAR), __ATOMIC_RELEASE);
    return __atomic_load_n(&s->patient, __ATOMIC_ACQUIRE);
}

int hd_stopped_explains(hd_session *s)
{
    const struct timespec nap = {0, 1000000};
    const int64_t until = hd_stopped_end(s);
    while (!hd_session_broken(s) && hd_now() < until) {
        hd_session_progress(s); /* other nodes tell of a death through MPI */
        nanosleep(&nap, NULL);
    }
    return until && hd_session_broken(s);
}

void hd_stopped_explain(hd_comm *c, hd_job *j)
{
    char why[160], text[HD_TEXT];
    if (!hd_stopped_explains(c->session))
        return;
    hd_ft_why(c->session, why, sizeof why);
    snprintf(text, sizeof text, "%s", j->text ? j->text : "");
    hd_fail(j, HD_ERR_FAILED, "%s: %s", why, text);
}
