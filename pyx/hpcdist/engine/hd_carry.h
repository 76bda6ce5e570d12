/* Collectives of a few bytes per rank: they travel with the entry check, and need no MPI call. */
#ifndef HD_CARRY_H
#define HD_CARRY_H

#include "hd_check.h"
#include "hd_job.h"

/* Whether this rank's part of the call is short enough, and how the check then carries it. It does
 * so if that is true of all ranks. */
int hd_carries(const hd_comm *c, const hd_job *j, hd_carry *out);

#endif
