/* How the ranks of a communicator meet when a group of all of them is to be made: under a deadline,
 * and without an MPI call that blocks. */
#ifndef HD_MEET_H
#define HD_MEET_H

#include <mpi.h>
#include <stddef.h>
#include <stdint.h>

/* A duplicate of `from`, on all its ranks or on none; HD_OK, or an error with a text. It may be
 * called again. */
int hd_meet(MPI_Comm from, int64_t until, MPI_Comm *made, char *text, size_t room);

#endif
