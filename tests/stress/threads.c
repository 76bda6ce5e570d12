/* Jobs, lanes, their Works and the notices of their ends, from many threads at once: for ThreadSanitizer.
 *
 *   threads SEED SUBMITTERS JOBS
 *
 * Threads submit jobs to a few groups, inline where the lane is empty, else queued, as submit.pxi does; wait for
 * them, look at them or drop them; ask for notices, which another thread takes. A job is run by hd_exec below, which
 * looks that it is alone on its lane and that jobs come in the order in which they were queued. In the end no job is
 * left. */
#include <pthread.h>
#include <string.h>

#include "harness.h"
#include "hd_exec.h"
#include "hd_lane.h"
#include "hd_notify.h"

enum { GROUPS = 3, THREADS = 16 };

typedef struct group {
    hd_comm c;
    pthread_mutex_t order; /* the GIL's part: a job gets its number and its place in the queue at once */
    uint32_t last;         /* of the job that ran last; whoever holds the lane */
    int inside;
} group;

static group groups[GROUPS];
static uint64_t seed, jobs, wrong, freed, made, noticed;

void hd_exec(hd_comm *c, hd_job *j)
{
    group *g = (group *)c;
    if (__atomic_exchange_n(&g->inside, 1, __ATOMIC_RELAXED) || (int32_t)(j->seq - g->last) <= 0)
        __atomic_add_fetch(&wrong, 1, __ATOMIC_RELAXED);
    g->last = j->seq; /* not atomic: the lane orders it */
    if (j->seq % 64 == 0)
        nap_us(50);
    if (j->seq % 7 == 0)
        hd_fail(j, HD_ERR_TIMEOUT, "job %u fails", j->seq);
    __atomic_store_n(&g->inside, 0, __ATOMIC_RELAXED);
}

static void dispose(hd_job *j)
{
    if ((j->code != HD_OK) != (j->seq % 7 == 0))
        __atomic_add_fetch(&wrong, 1, __ATOMIC_RELAXED);
    hd_job_clear(j);
    free(j);
    __atomic_add_fetch(&freed, 1, __ATOMIC_RELAXED);
}

static void let_go(hd_job *j) /* work.pxi's unref() */
{
    if (__atomic_sub_fetch(&j->refs, 1, __ATOMIC_ACQ_REL) == 0)
        dispose(j);
}

/* With g->order held, which it gives back. */
static int inline_one(group *g)
{
    hd_job j;
    if (!hd_lane_try(&g->c))
        return 0;
    hd_job_init(&j, &g->c, HD_BARRIER, "barrier");
    j.seq = ++g->c.seq;
    j.inline_ = 1;
    pthread_mutex_unlock(&g->order);
    hd_lane_run(&g->c, &j);
    hd_job_clear(&j);
    return 1;
}

static hd_job *queue_one(group *g)
{
    hd_job *j = malloc(sizeof *j);
    hd_job_init(j, &g->c, HD_BARRIER, "barrier");
    j->refs = 2;
    __atomic_add_fetch(&made, 1, __ATOMIC_RELAXED);
    j->seq = ++g->c.seq;
    if (hd_lane_submit(&g->c, j))
        abort();
    return j;
}

static void *submitter(void *arg)
{
    chance luck = chance_of(seed, (uint64_t)(intptr_t)arg);
    for (uint64_t i = 0; i < jobs; i++) {
        group *g = &groups[draw(&luck, GROUPS)];
        hd_job *j;
        pthread_mutex_lock(&g->order);
        if (draw(&luck, 2) && inline_one(g))
            continue;
        j = queue_one(g);
        pthread_mutex_unlock(&g->order);
        if (draw(&luck, 3) == 0) {
            __atomic_add_fetch(&j->refs, 1, __ATOMIC_RELAXED); /* the notice's, as Python's dict has it */
            if (!hd_job_watch(j))
                let_go(j);
        }
        if (draw(&luck, 3))
            while (!hd_job_wait(j, 1e-6 * (double)draw(&luck, 300)))
                ;
        else
            (void)hd_job_state(j);
        let_go(j);
    }
    return NULL;
}

static void *taker(void *arg)
{
    hd_job *j;
    (void)arg;
    while ((j = hd_notify_next())) {
        if (hd_job_state(j) != HD_DONE)
            __atomic_add_fetch(&wrong, 1, __ATOMIC_RELAXED);
        __atomic_add_fetch(&noticed, 1, __ATOMIC_RELAXED);
        let_go(j);
    }
    return NULL;
}

int main(int argc, char **argv)
{
    pthread_t all[THREADS], notices;
    int n;
    if (argc != 4 || (n = atoi(argv[2])) < 1 || n > THREADS) {
        fprintf(stderr, "usage: threads SEED SUBMITTERS JOBS\n");
        return 2;
    }
    seed = strtoull(argv[1], NULL, 10);
    jobs = strtoull(argv[3], NULL, 10);
    hd_py.release = dispose;
    hd_py.notify = hd_notify_push;
    for (int i = 0; i < GROUPS; i++) {
        pthread_condattr_t attr;
        hd_comm *c = &groups[i].c;
        pthread_mutex_init(&groups[i].order, NULL);
        pthread_mutex_init(&c->mu, NULL);
        pthread_condattr_init(&attr);
        pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
        pthread_cond_init(&c->lane.work_cv, NULL);
        pthread_cond_init(&c->lane.done_cv, &attr);
        c->size = 2;
    }
    pthread_create(&notices, NULL, taker, NULL);
    for (int i = 0; i < n; i++)
        pthread_create(&all[i], NULL, submitter, (void *)(intptr_t)i);
    for (int i = 0; i < n; i++)
        pthread_join(all[i], NULL);
    for (int i = 0; i < GROUPS; i++) {
        if (!hd_lane_drain(&groups[i].c, 60))
            wrong++;
        hd_lane_close(&groups[i].c);
    }
    hd_notify_stop();
    pthread_join(notices, NULL);
    if (made != freed)
        wrong++;
    printf("%d threads, %llu jobs queued of %llu, %llu notices, %llu wrong\n", n, (unsigned long long)made,
           (unsigned long long)(jobs * (uint64_t)n), (unsigned long long)noticed, (unsigned long long)wrong);
    return wrong ? 1 : 0;
}
