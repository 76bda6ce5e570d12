/* A lane: the order of one group's collectives. A synchronous call on an empty lane runs on the caller's
 * own thread (a handoff costs 10 us); everything else queues for a C thread that never takes the GIL, so
 * a main thread busy in Python cannot hold it up. Submissions come one at a time (the caller holds the
 * GIL, or the lane's mutex decides), and so does execution. */
#define _GNU_SOURCE
#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "hd_engine.h"

int hd_lanes_busy;

/* Dekker with the submitter: clear busy, then look whether somebody queued meanwhile. */
static void leave(hd_comm *c)
{
    __atomic_store_n(&c->busy, 0, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&c->pending, __ATOMIC_SEQ_CST)) {
        pthread_mutex_lock(&c->mu); /* the lane has either seen busy change, or waits */
        pthread_mutex_unlock(&c->mu);
        pthread_cond_signal(&c->work_cv);
    }
}

int hd_lane_try(hd_comm *c)
{
    int idle = 0;
    if (__atomic_load_n(&c->pending, __ATOMIC_ACQUIRE))
        return 0;
    if (!__atomic_compare_exchange_n(&c->busy, &idle, 1, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
        return 0;
    if (!__atomic_load_n(&c->pending, __ATOMIC_SEQ_CST))
        return 1;
    leave(c); /* somebody queued in between: first come, first served */
    return 0;
}

void hd_lane_leave(hd_comm *c) { leave(c); }

void hd_lane_run(hd_comm *c, hd_job *j)
{
    hd_exec(c, j);
    leave(c);
}

/* The lane sleeps much and works little at a time: it asks for short time slices, which it may have at once when
 * it wakes beside a thread that computes (Linux 6.12; before, the wish is ignored), and for exact naps. */
static void ask_for_short_slices(void)
{
    struct {
        uint32_t size, policy;
        uint64_t flags;
        int32_t nice;
        uint32_t priority;
        uint64_t runtime, deadline, period;
    } wish = {.size = sizeof wish};
    prctl(PR_SET_TIMERSLACK, 1000);
    if (syscall(SYS_sched_getattr, 0, &wish, sizeof wish, 0) == 0 && wish.policy == SCHED_OTHER) {
        wish.runtime = 100000; /* ns, the least there is */
        syscall(SYS_sched_setattr, 0, &wish, 0);
    }
}

static void *lane_main(void *arg)
{
    hd_comm *c = arg;
    prctl(PR_SET_NAME, "hpcdist-lane");
    ask_for_short_slices();
    pthread_mutex_lock(&c->mu);
    for (;;) {
        hd_job *j;
        while ((!c->head && !c->stop) || __atomic_load_n(&c->busy, __ATOMIC_SEQ_CST))
            pthread_cond_wait(&c->work_cv, &c->mu);
        if (!c->head)
            break;
        j = c->head;
        c->head = j->next;
        if (!c->head)
            c->tail = NULL;
        j->next = NULL;
        __atomic_store_n(&j->state, HD_RUNNING, __ATOMIC_RELEASE);
        pthread_mutex_unlock(&c->mu);

        __atomic_add_fetch(&hd_lanes_busy, 1, __ATOMIC_SEQ_CST);
        hd_exec(c, j);
        __atomic_sub_fetch(&hd_lanes_busy, 1, __ATOMIC_SEQ_CST);
        __atomic_sub_fetch(&c->pending, 1, __ATOMIC_SEQ_CST);
        hd_job_finish(j);
        hd_job_unref(j);

        pthread_mutex_lock(&c->mu);
    }
    pthread_mutex_unlock(&c->mu);
    return NULL;
}

int hd_lane_submit(hd_comm *c, hd_job *j)
{
    int rc = 0;
    pthread_mutex_lock(&c->mu);
    if (c->closing && !j->closing) {
        rc = -1;
    } else if (!c->started) {
        sigset_t all, old;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &old); /* Python's signals belong to the main thread */
        rc = pthread_create(&c->thread, NULL, lane_main, c);
        pthread_sigmask(SIG_SETMASK, &old, NULL);
        c->started = rc == 0;
    }
    if (rc == 0) {
        if (c->tail)
            c->tail->next = j;
        else
            c->head = j;
        c->tail = j;
        __atomic_add_fetch(&c->pending, 1, __ATOMIC_SEQ_CST);
    }
    pthread_mutex_unlock(&c->mu);
    pthread_cond_signal(&c->work_cv); /* without the mutex, on which the lane would fall asleep again */
    return rc;
}

int hd_lane_drain(hd_comm *c, double seconds)
{
    const int64_t until = hd_now() + (int64_t)(seconds * 1e9);
    while (__atomic_load_n(&c->pending, __ATOMIC_SEQ_CST) || __atomic_load_n(&c->busy, __ATOMIC_SEQ_CST)) {
        struct timespec nap = {0, 200000};
        if (hd_now() > until)
            return 0;
        nanosleep(&nap, NULL);
    }
    return 1;
}

void hd_lane_close(hd_comm *c)
{
    if (!c->started)
        return;
    pthread_mutex_lock(&c->mu);
    c->stop = 1;
    pthread_cond_signal(&c->work_cv);
    pthread_mutex_unlock(&c->mu);
    pthread_join(c->thread, NULL);
    c->started = 0;
}
