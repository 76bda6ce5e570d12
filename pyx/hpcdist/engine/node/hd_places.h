/* HPCDIST_NODES: for tests, the ranks of one machine stand where those of several nodes would. */
#ifndef HD_PLACES_H
#define HD_PLACES_H

#include <mpi.h>

#include "hd_base.h"

/* Sets the number of the node that this rank stands for; -1 where the variable says nothing, on
 * all ranks then. It depends on the rank in MPI_COMM_WORLD: a session of the ranks that are left
 * has them where they were. Collective; all ranks get the same error. */
int hd_place(MPI_Comm ctl, int *place, hd_text *t);

#endif
