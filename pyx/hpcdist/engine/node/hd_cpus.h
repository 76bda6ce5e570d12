/* The cores of a process, and of all ranks of its node. */
#ifndef HD_CPUS_H
#define HD_CPUS_H

#include <mpi.h>
#include <stdint.h>

/* The share of the cores' time that a control group grants; all processes of the group share it.
 * cores <= 0: no limit. */
typedef struct hd_quota {
    double cores;
    uint64_t group;
} hd_quota;

/* Counts the cores that this process may keep busy, and those that all ranks of a node may:
 * affinity masks and quotas. Collective over the node; both are at least 1. */
void hd_cpus_count(MPI_Comm node, hd_quota quota, int *own, int *all);

#endif
