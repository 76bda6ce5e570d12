#define _GNU_SOURCE /* syscall */
#include "hd_cpus.h"

#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define WORDS 128 /* 8,192 CPUs, Linux's most; cpu_set_t ends at 1,024 */

static void allowed(uint64_t *mask)
{
    memset(mask, 0, WORDS * sizeof *mask);
    if (syscall(SYS_sched_getaffinity, 0, WORDS * sizeof *mask, mask) <= 0)
        for (long i = 0; i < sysconf(_SC_NPROCESSORS_ONLN) && i < WORDS * 64; i++)
            mask[i / 64] |= UINT64_C(1) << i % 64;
}

static int count(const uint64_t *mask)
{
    int n = 0;
    for (int i = 0; i < WORDS; i++)
        n += __builtin_popcountll(mask[i]);
    return n;
}

static int within(int cores, double granted)
{
    if (granted < cores)
        cores = (int)granted;
    return cores < 1 ? 1 : cores;
}

/* What the groups of all ranks grant together; -1 where one of them has no limit. */
static double granted_together(const hd_quota *of, int n)
{
    double sum = 0;
    for (int i = 0; i < n; i++) {
        int counted = 0;
        if (of[i].cores <= 0)
            return -1;
        for (int j = 0; j < i && !counted; j++)
            counted = of[j].group == of[i].group;
        sum += counted ? 0 : of[i].cores;
    }
    return sum;
}

void hd_cpus_count(MPI_Comm node, hd_quota quota, int *own, int *all)
{
    uint64_t mask[WORDS];
    hd_quota *of = NULL;
    double together = -1;
    int n, have;

    allowed(mask);
    *own = quota.cores > 0 ? within(count(mask), quota.cores) : count(mask);
    MPI_Allreduce(MPI_IN_PLACE, mask, WORDS, MPI_UINT64_T, MPI_BOR, node);
    *all = count(mask);
    /* Most jobs have no quota on any rank: they need no table of all ranks. */
    have = quota.cores > 0;
    MPI_Allreduce(MPI_IN_PLACE, &have, 1, MPI_INT, MPI_MIN, node);
    if (!have)
        return;
    MPI_Comm_size(node, &n);
    of = calloc((size_t)n, sizeof *of);
    have = of != NULL;
    MPI_Allreduce(MPI_IN_PLACE, &have, 1, MPI_INT, MPI_MIN, node);
    if (have) {
        MPI_Allgather(&quota, (int)sizeof quota, MPI_BYTE, of, (int)sizeof quota, MPI_BYTE, node);
        together = granted_together(of, n);
    }
    free(of);
    *all = together > 0 ? within(*all, together) : *all;
}
