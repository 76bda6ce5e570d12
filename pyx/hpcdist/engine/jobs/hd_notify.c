/* The queue between the threads that finish jobs and the one Python thread that completes futures:
 * a finisher never takes the GIL, so a main thread busy in Python cannot hold up the lane. */
#include <sched.h>

#include "hd_job.h"
#include "hd_notify.h"

static pthread_mutex_t mu = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t cv = PTHREAD_COND_INITIALIZER;
static hd_job *first, **last = &first;
static int stopped;

void hd_notify_push(hd_job *j)
{
    pthread_mutex_lock(&mu);
    j->ready = NULL;
    *last = j;
    last = &j->ready;
    pthread_cond_signal(&cv);
    pthread_mutex_unlock(&mu);
}

hd_job *hd_notify_next(void)
{
    hd_job *j;
    pthread_mutex_lock(&mu);
    while (!first && !stopped)
        pthread_cond_wait(&cv, &mu);
    j = first;
    if (j) {
        first = j->ready;
        if (!first)
            last = &first;
    }
    pthread_mutex_unlock(&mu);
    return j;
}

void hd_notify_stop(void)
{
    pthread_mutex_lock(&mu);
    stopped = 1;
    pthread_cond_broadcast(&cv);
    pthread_mutex_unlock(&mu);
}

int hd_job_watch(hd_job *j)
{
    int before = HD_UNWATCHED;
    return __atomic_compare_exchange_n(&j->watched, &before, HD_WATCHED, 0, __ATOMIC_ACQ_REL,
                                       __ATOMIC_ACQUIRE) ||
           before == HD_WATCHED;
}

void hd_job_settle(const hd_job *j)
{
    while (hd_job_state(j) != HD_DONE)
        sched_yield();
}
