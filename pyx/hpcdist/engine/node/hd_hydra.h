/* Copies of a neighbour's connections to MPICH's launcher, and this rank's own one. */
#ifndef HD_HYDRA_H
#define HD_HYDRA_H

#include <mpi.h>
#include <stdint.h>

#include "hd_session.h"

/* Collective over the ranks of a node. held: the descriptors to close at the end, or -1. */
void hd_hydra_copy(MPI_Comm comm, uint64_t node, int slot, int n, int held[HD_HELD]);
/* The launcher's process on this node has gone, without the end of this one. */
int hd_hydra_gone(void);
/* MPI ends, and closes the connection. */
void hd_hydra_leave(void);

#endif
