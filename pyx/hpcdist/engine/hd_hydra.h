/* Copies of a neighbour's connections to MPICH's launcher. */
#ifndef HD_HYDRA_H
#define HD_HYDRA_H

#include <mpi.h>
#include <stdint.h>

#include "hd_session.h"

/* Collective over the ranks of a node. held: the descriptors to close at the end, or -1. */
void hd_hydra_copy(MPI_Comm comm, uint64_t node, int slot, int n, int held[HD_HELD]);

#endif
