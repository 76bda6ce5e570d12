/* MPICH's copies between processes: see hd_cma.c. */
#ifndef HD_CMA_H
#define HD_CMA_H

#include <mpi.h>

/* Turns them off if a rank of the node may not read its neighbour's memory. Collective over the
 * node, before anything large is sent. */
void hd_cma_try(MPI_Comm node);

#endif
