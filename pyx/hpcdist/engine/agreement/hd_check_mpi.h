/* The entry check of a group that spans nodes: see hd_check_mpi.c. */
#ifndef HD_CHECK_MPI_H
#define HD_CHECK_MPI_H

#include <stdint.h>

#include "hd_job.h"

int hd_check_mpi(hd_comm *c, hd_job *j, uint64_t fingerprint);

#endif
