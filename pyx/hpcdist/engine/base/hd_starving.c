/* How long a thread has waited for a core: see hd_starving.h. */
#define _GNU_SOURCE
#include <stdio.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "hd_base.h"
#include "hd_process.h"
#include "hd_starving.h"

int hd_tid(void)
{
    static __thread int mine;
    if (!mine)
        mine = (int)syscall(SYS_gettid);
    return mine;
}

/* ns; -1: the kernel does not tell. */
static int64_t waited(int tid)
{
    char path[64];
    long long ran, ns;
    unsigned long slices = 0;
    FILE *f;
    snprintf(path, sizeof path, "/proc/self/task/%d/schedstat", tid);
    if (!(f = fopen(path, "re")))
        return -1;
    if (fscanf(f, "%lld %lld %lu", &ran, &ns, &slices) != 3)
        slices = 0;
    fclose(f);
    return slices ? ns : -1; /* of a thread that exists, 0 means that nothing is counted */
}

/* ns; -1: there is no such thread. Unlike the file's, this clock runs while the thread does. */
static int64_t processor_time(int tid)
{
    struct timespec t;
    /* what pthread_getcpuclockid gives: CPUCLOCK_SCHED of one thread */
    const clockid_t of = (clockid_t)((~(unsigned)tid << 3) | 6);
    return clock_gettime(of, &t) ? -1 : t.tv_sec * 1000000000LL + t.tv_nsec;
}

int64_t hd_starving_look(hd_starving *w, int tid)
{
    const int64_t now = hd_now(), ran = processor_time(tid), ns = waited(tid);
    int64_t all;
    if (ran < 0 || ns < 0)
        return 0;
    if (w->tid != tid)
        *w = (hd_starving){.tid = tid, .begun = now, .waited_at_begin = ns};
    else if (ns != w->waited)
        w->waits = 0; /* it has got a core, and the kernel has counted */
    else if (hd_process_state(tid) == 'R' && now - w->at > ran - w->ran)
        w->waits += now - w->at - (ran - w->ran);
    w->at = now;
    w->ran = ran;
    w->waited = ns;
    all = ns - w->waited_at_begin + w->waits;
    return all < now - w->begun ? all : now - w->begun; /* it may have waited before the first */
}
