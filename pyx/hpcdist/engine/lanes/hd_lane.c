/* A lane: the order of one group's collectives. A synchronous call on an empty lane runs on the
 * caller's own thread (a handoff costs 10 us). Everything else queues for a C thread that never
 * takes the GIL, so a main thread busy in Python cannot hold it up. Operations are submitted one at
 * a time (the caller holds the GIL, or the lane's mutex decides), and executed one at a time. */
#define _GNU_SOURCE
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "hd_base.h"
#include "hd_comm.h"
#include "hd_exec.h"
#include "hd_job.h"
#include "hd_lane.h"

int hd_lane_jobs;

/* Dekker's algorithm with the submitter: clear busy, then check whether a job was queued
 * meanwhile. */
static void leave(hd_comm *c)
{
    __atomic_store_n(&c->lane.busy, 0, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&c->lane.pending, __ATOMIC_SEQ_CST)) {
        pthread_mutex_lock(&c->mu); /* the lane's thread has either seen busy change, or waits */
        pthread_mutex_unlock(&c->mu);
        pthread_cond_signal(&c->lane.work_cv);
    }
}

int hd_lane_try(hd_comm *c)
{
    int idle = 0;
    if (__atomic_load_n(&c->lane.pending, __ATOMIC_ACQUIRE))
        return 0;
    if (!__atomic_compare_exchange_n(&c->lane.busy, &idle, 1, 0, __ATOMIC_SEQ_CST,
                                     __ATOMIC_SEQ_CST))
        return 0;
    if (!__atomic_load_n(&c->lane.pending, __ATOMIC_SEQ_CST))
        return 1;
    leave(c); /* a job was queued in between: first come, first served */
    return 0;
}

void hd_lane_leave(hd_comm *c) { leave(c); }

void hd_lane_run(hd_comm *c, hd_job *j)
{
    hd_exec(c, j);
    leave(c);
}

/* The lane's thread sleeps much and works little at a time. It asks for short time slices, so that
 * it may run as soon as it wakes beside a thread that computes (from Linux 6.12; earlier kernels
 * ignore the wish), and for exact naps. */
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
        wish.runtime = 100000; /* ns, the minimum */
        syscall(SYS_sched_setattr, 0, &wish, 0);
    }
}

/* ---- operations queued behind a failure ----
 *
 * Operations in flight may build on each other: if a first all_reduce fails and leaves the tensor
 * as it was, a second one of the same tensor would succeed with a wrong number. And each would
 * wait for the peer that did not reach the first. So when an operation fails by a timeout or
 * because a peer is missing, those behind it fail at once, until the program has seen the failure.
 * In the entry check such an operation tells the others its reason, and waits for no rank: all
 * ranks stay in step. (After a mismatch they are in step anyway, and all of them have arrived.) */

static int begun_before_seen(const hd_comm *c, const hd_job *j)
{
    return c->failure.text && (c->failure.unseen || (int32_t)(j->seq - c->failure.upto) <= 0);
}

/* The program finalizes MPI, and did not wait for this one, which this rank or another gave up. */
static void fail_ended(const hd_comm *c, hd_job *j)
{
    if (!hd_job_ends(j) || __atomic_load_n(&j->unwanted, __ATOMIC_ACQUIRE) ||
        (j->code != HD_ERR_INTERRUPT && j->code != HD_ERR_TIMEOUT))
        return;
    j->code = HD_OK;
    hd_fail(j, HD_ERR_CLOSED,
            "the program finalized MPI before %s #%u of group '%s' (this is rank %d of %d%s%s) had "
            "ended",
            j->api, j->seq, c->name, c->rank, c->size, j->site[0] ? ", called at " : "", j->site);
}

/* With c->mu held. */
static void pass_on_cause(hd_comm *c, hd_job *j)
{
    if (hd_job_ends(j) && !j->refusal.why) {
        j->code = HD_ERR_INTERRUPT;
        j->refusal.why = "its program finalizes MPI";
        j->refusal.code = HD_ERR_FAILED;
        return;
    }
    if (!begun_before_seen(c, j) || j->refusal.why)
        return;
    j->cause = malloc(HD_TEXT);
    j->refusal.why = "it was queued behind an operation that failed";
    j->refusal.code = c->failure.code;
    if (!j->cause)
        return;
    snprintf(j->cause, HD_TEXT, "%s #%u of group '%s' (this is rank %d of %d) was queued behind %s",
             j->api, j->seq, c->name, c->rank, c->size, c->failure.text);
    j->refusal.why = j->cause;
}

/* With c->mu held. The first operation that failed before the program saw any failure is the
 * cause. */
static void keep_cause(hd_comm *c, const hd_job *j)
{
    if ((j->code != HD_ERR_TIMEOUT && j->code != HD_ERR_FAILED) || !c->check ||
        begun_before_seen(c, j))
        return;
    if (!c->failure.text && !(c->failure.text = malloc(HD_TEXT)))
        return;
    snprintf(c->failure.text, HD_TEXT, "%s #%u, which failed: %s", j->api, j->seq,
             j->text ? j->text : "no memory to say why");
    c->failure.code = j->code;
    c->failure.unseen = !(c->failure.given_up && (int32_t)(j->seq - c->failure.given_up_to) <= 0);
    if (!c->failure.unseen)
        c->failure.upto = c->failure.given_up_to;
}

/* With c->mu held, once the lane contains nothing that was begun before the failure was seen. */
static void forget_cause(hd_comm *c)
{
    free(c->failure.text);
    c->failure.text = NULL;
}

void hd_lane_seen(hd_comm *c)
{
    pthread_mutex_lock(&c->mu);
    if (c->failure.text && c->failure.unseen) {
        c->failure.unseen = 0;
        c->failure.upto = c->seq;
        if (!__atomic_load_n(&c->lane.pending, __ATOMIC_SEQ_CST))
            forget_cause(c);
    }
    pthread_mutex_unlock(&c->mu);
}

void hd_lane_give_up(hd_comm *c)
{
    hd_lane_seen(c);
    pthread_mutex_lock(&c->mu);
    c->failure.given_up = __atomic_load_n(&c->lane.pending, __ATOMIC_SEQ_CST) > 0;
    c->failure.given_up_to = c->seq;
    pthread_mutex_unlock(&c->mu);
}

static void *lane_main(void *arg)
{
    hd_comm *c = arg;
    prctl(PR_SET_NAME, "hpcdist-lane");
    ask_for_short_slices();
    pthread_mutex_lock(&c->mu);
    for (;;) {
        hd_job *j;
        while ((!c->lane.head && !c->lane.stop) || __atomic_load_n(&c->lane.busy, __ATOMIC_SEQ_CST))
            pthread_cond_wait(&c->lane.work_cv, &c->mu);
        if (!c->lane.head)
            break;
        j = c->lane.head;
        c->lane.head = j->next;
        if (!c->lane.head)
            c->lane.tail = NULL;
        j->next = NULL;
        __atomic_store_n(&j->state, HD_RUNNING, __ATOMIC_RELEASE);
        pass_on_cause(c, j);
        pthread_mutex_unlock(&c->mu);

        hd_exec(c, j);
        if (j->cause)
            hd_fail(j, j->refusal.code, "%s", j->cause);
        fail_ended(c, j);
        pthread_mutex_lock(&c->mu);
        keep_cause(c, j);
        if (c->failure.text && !c->failure.unseen && !c->lane.head)
            forget_cause(c);
        if (!c->lane.head)
            c->failure.given_up = 0;
        pthread_mutex_unlock(&c->mu);
        __atomic_sub_fetch(&c->lane.pending, 1, __ATOMIC_SEQ_CST);
        __atomic_sub_fetch(&hd_lane_jobs, 1, __ATOMIC_SEQ_CST);
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
    } else if (!c->lane.started) {
        rc = hd_thread_start(&c->lane.thread, lane_main, c);
        c->lane.started = rc == 0;
    }
    if (rc == 0) {
        if (c->lane.tail)
            c->lane.tail->next = j;
        else
            c->lane.head = j;
        c->lane.tail = j;
        __atomic_add_fetch(&hd_lane_jobs, 1, __ATOMIC_SEQ_CST);
        __atomic_add_fetch(&c->lane.pending, 1, __ATOMIC_SEQ_CST);
    }
    pthread_mutex_unlock(&c->mu);
    /* Without the mutex, on which the lane's thread would block again. */
    pthread_cond_signal(&c->lane.work_cv);
    return rc;
}

int hd_lane_take_back(hd_comm *c, hd_job *j)
{
    int state;
    pthread_mutex_lock(&c->mu);
    state = hd_job_state(j);
    if (state == HD_QUEUED) {
        j->code = HD_ERR_INTERRUPT;
        j->refusal.why =
            "a signal handler raised while the call was queued behind another operation";
        j->refusal.code = HD_ERR_TIMEOUT;
    } else if (state == HD_RUNNING) {
        __atomic_store_n(&j->unwanted, 1, __ATOMIC_RELEASE);
    }
    pthread_mutex_unlock(&c->mu);
    return state;
}

int hd_lane_drain(hd_comm *c, double seconds)
{
    const int64_t until = hd_until(seconds);
    while (__atomic_load_n(&c->lane.pending, __ATOMIC_SEQ_CST) ||
           __atomic_load_n(&c->lane.busy, __ATOMIC_SEQ_CST)) {
        struct timespec nap = {0, 200000};
        if (hd_now() > until)
            return 0;
        nanosleep(&nap, NULL);
    }
    return 1;
}

static void stop(hd_comm *c)
{
    pthread_mutex_lock(&c->mu);
    c->lane.stop = 1;
    pthread_cond_signal(&c->lane.work_cv);
    pthread_mutex_unlock(&c->mu);
    pthread_join(c->lane.thread, NULL);
    c->lane.started = 0;
}

void hd_lane_close(hd_comm *c)
{
    if (c->lane.started)
        stop(c);
    free(c->failure.text);
    c->failure.text = NULL;
}
