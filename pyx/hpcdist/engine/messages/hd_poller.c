/* The poller: the messages in flight that no thread waits for yet, and their end; and those of
 * entry checks that MPI has not sent yet (hd_unsent.h).
 *
 * A thread that waits for a message looks after that message itself. The poller takes the others,
 * so it is in no hurry: if it looked at once, it would take the core from the thread that is about
 * to wait (on two cores an irecv then took 30 us instead of 4). */
#define _GNU_SOURCE
#include <sys/prctl.h>
#include <time.h>

#include "hd_base.h"
#include "hd_comm.h"
#include "hd_envelope.h"
#include "hd_job.h"
#include "hd_p2p.h"
#include "hd_poller.h"
#include "hd_threads.h"
#include "hd_unsent.h"

#define CLOSING 1.0 /* seconds for callers to leave a group that is being destroyed */

int hd_callers;

static struct {
    pthread_mutex_t mu;
    pthread_cond_t cv;
    hd_job *list;
    int started, asleep; /* atomic */
    int stop;            /* it has to end, and none may start */
    pthread_t thread;
} poller = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, NULL, 0, 0, 0, 0};

/* Jobs that are not on the list yet. Most end here: their owner waits for them, and takes them
 * out again, before the poller has looked. Its mutex may be taken under the poller's. */
static struct {
    pthread_mutex_t mu;
    hd_job *first;
    uint32_t taken_out; /* by their owners so far */
} inbox = {PTHREAD_MUTEX_INITIALIZER, NULL, 0};

enum {
    FIRST_NAP = 100000,
    LONGEST_NAP = 500000,
    UNSENT_NAP = 10000000,
    IDLE_NAPS = 10,
    PASSED = 4
}; /* ns, ns, ns with nothing but what is unsent, naps before it sleeps for good, naps without a
      look while owners take jobs out */

static void put(hd_job *first)
{
    pthread_mutex_lock(&inbox.mu);
    for (hd_job *j = first, *next; j; j = next) {
        next = j->next;
        j->next = inbox.first;
        if (j->next)
            j->next->at = &j->next;
        inbox.first = j;
        j->at = &inbox.first;
    }
    pthread_mutex_unlock(&inbox.mu);
}

/* With inbox.mu held. */
static void take_out(hd_job *j)
{
    *j->at = j->next;
    if (j->next)
        j->next->at = j->at;
    j->at = NULL;
}

/* With poller.mu held. */
static void take_in(void)
{
    hd_job *j;
    pthread_mutex_lock(&inbox.mu);
    while ((j = inbox.first)) {
        take_out(j);
        j->next = poller.list;
        poller.list = j;
    }
    pthread_mutex_unlock(&inbox.mu);
}

/* Whether jobs have come. `seen` is the caller's: how many owners had taken out when it last
 * looked; *others: whether more have since. */
static int has_come(uint32_t *seen, int *others)
{
    int come;
    pthread_mutex_lock(&inbox.mu);
    come = inbox.first != NULL;
    *others = inbox.taken_out != *seen;
    *seen = inbox.taken_out;
    pthread_mutex_unlock(&inbox.mu);
    return come;
}

int hd_p2p_unwatch(hd_job *j)
{
    int out = 0;
    if (hd_job_state(j) != HD_DONE || hd_p2p_unfinished(j))
        return 0;
    pthread_mutex_lock(&inbox.mu);
    if (j->at) {
        take_out(j);
        inbox.taken_out++;
        out = 1;
    }
    pthread_mutex_unlock(&inbox.mu);
    return out;
}

/* Takes finished jobs off the list; with poller.mu held. 1: one of them ended here. */
static int sweep(void)
{
    int progressed = 0;
    take_in();
    for (hd_job **p = &poller.list; *p;) {
        hd_job *j = *p;
        if (hd_job_state(j) != HD_DONE)
            progressed |= hd_p2p_look_after(j);
        if (hd_job_state(j) == HD_DONE) {
            *p = j->next;
            j->next = NULL;
            /* A send that was given up still reads its buffer: this reference is never dropped. */
            if (!hd_p2p_unfinished(j))
                hd_job_unref(j);
        } else {
            p = &j->next;
        }
    }
    return progressed;
}

/* Not where a test needs the lock of all calls of MPI, or may wait for a GPU. */
static void test_in_two(hd_job *first)
{
    for (hd_job *j = first; j; j = j->next)
        if (hd_message_in_two(j) && !hd_session_serialized(j->comm->session) &&
            !j->message.on_device)
            hd_p2p_test(j);
}

/* Leaves the jobs where they are: their owners take them out when they have ended. */
static void test_others(void)
{
    pthread_mutex_lock(&inbox.mu);
    test_in_two(inbox.first);
    pthread_mutex_unlock(&inbox.mu);
    if (pthread_mutex_trylock(&poller.mu))
        return; /* the poller looks at its own just now */
    test_in_two(poller.list);
    pthread_mutex_unlock(&poller.mu);
}

static long longer(long nap)
{
    const long most = poller.list || !hd_unsent_any() ? LONGEST_NAP : UNSENT_NAP;
    return nap < most ? nap * 5 / 4 : most;
}

static void *poller_main(void *arg)
{
    long nap = FIRST_NAP;
    int idle = 0, others = 0, passed = 0;
    uint32_t seen = 0;
    (void)arg;
    prctl(PR_SET_NAME, "hpcdist-poll");
    pthread_mutex_lock(&poller.mu);
    while (!poller.stop) {
        struct timespec ts;
        if (idle > IDLE_NAPS) {
            /* Then check: hd_p2p_watch uses the opposite order. */
            __atomic_store_n(&poller.asleep, 1, __ATOMIC_SEQ_CST);
            while (!poller.stop && !has_come(&seen, &others) && !hd_unsent_any())
                pthread_cond_wait(&poller.cv, &poller.mu);
            __atomic_store_n(&poller.asleep, 0, __ATOMIC_SEQ_CST);
            nap = FIRST_NAP;
            idle = 0;
        }
        pthread_mutex_unlock(&poller.mu);
        ts = (struct timespec){0, nap};
        nanosleep(&ts, NULL);
        hd_unsent_look_after();
        pthread_mutex_lock(&poller.mu);
        has_come(&seen, &others);
        if (others && !poller.list && passed++ < PASSED) {
            idle = 0; /* the program looks after its messages, and MPI makes progress */
            nap = longer(nap);
            continue;
        }
        passed = 0;
        /* Waiting uses a share of a core. */
        nap = sweep() ? FIRST_NAP : longer(nap);
        idle = poller.list || hd_unsent_any() ? 0 : idle + 1;
    }
    pthread_mutex_unlock(&poller.mu);
    return NULL;
}

static void start_poller(void)
{
    if (hd_thread_start(&poller.thread, poller_main, NULL) == 0)
        __atomic_store_n(&poller.started, 1, __ATOMIC_RELEASE);
}

void hd_p2p_watch(hd_job *first)
{
    int threads;
    if (!first)
        return;
    threads = !hd_session_serialized(first->comm->session);
    __atomic_store_n(&hd_p2p_others, test_others, __ATOMIC_RELEASE);
    put(first);
    if (__atomic_load_n(&poller.started, __ATOMIC_ACQUIRE) &&
        !__atomic_load_n(&poller.asleep, __ATOMIC_SEQ_CST))
        return;
    pthread_mutex_lock(&poller.mu);
    if (!poller.started && threads && !poller.stop)
        start_poller();
    if (!poller.started)
        sweep();
    pthread_cond_signal(&poller.cv);
    pthread_mutex_unlock(&poller.mu);
}

void hd_poller_sends(hd_comm *c)
{
    /* Below MPI_THREAD_MULTIPLE the next call of this process has to. */
    if (!c->post || hd_session_serialized(c->session) || !hd_unsent_keep(c->post))
        return;
    pthread_mutex_lock(&poller.mu);
    if (!poller.started && !poller.stop)
        start_poller();
    pthread_cond_signal(&poller.cv);
    pthread_mutex_unlock(&poller.mu);
}

static int in_flight(const hd_comm *c)
{
    int left = c ? __atomic_load_n(&c->inside, __ATOMIC_SEQ_CST)
                 : __atomic_load_n(&hd_callers, __ATOMIC_SEQ_CST);
    pthread_mutex_lock(&poller.mu);
    sweep();
    for (hd_job *j = poller.list; j; j = j->next)
        left += !c || j->comm == c;
    pthread_mutex_unlock(&poller.mu);
    return left;
}

int hd_p2p_drain(hd_comm *c, double seconds)
{
    const int64_t until = hd_until(seconds);
    while (in_flight(c)) {
        struct timespec nap = {0, 100000};
        if (hd_now() > until)
            return 0;
        nanosleep(&nap, NULL);
    }
    return 1;
}

void hd_p2p_recall(hd_comm *c)
{
    int sends = 0;
    pthread_mutex_lock(&poller.mu);
    take_in();
    for (hd_job *j = poller.list; j; j = j->next)
        sends += j->comm == c && j->kind == HD_SEND && hd_job_state(j) != HD_DONE;
    if (!sends)
        __atomic_store_n(&c->recalls, 1, __ATOMIC_RELEASE);
    pthread_mutex_unlock(&poller.mu);
}

int hd_p2p_close(hd_comm *c)
{
    int unfinished = 0;
    pthread_mutex_lock(&poller.mu);
    take_in();
    for (hd_job *j = poller.list; j; j = j->next) {
        if (c && j->comm != c)
            continue;
        hd_p2p_end(j);
        unfinished += hd_p2p_unfinished(j);
    }
    pthread_mutex_unlock(&poller.mu);
    return hd_p2p_drain(c, CLOSING) && !unfinished;
}

int hd_p2p_shutdown(void)
{
    int started;
    pthread_mutex_lock(&poller.mu);
    poller.stop = 1; /* and none is started again */
    started = poller.started;
    pthread_cond_signal(&poller.cv);
    pthread_mutex_unlock(&poller.mu);
    if (!started)
        return 1;
    if (!hd_thread_join(poller.thread))
        return 0;
    poller.started = 0;
    return 1;
}
