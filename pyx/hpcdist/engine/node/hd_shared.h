/* Memory that the ranks of a node share. */
#ifndef HD_SHARED_H
#define HD_SHARED_H

#include <mpi.h>
#include <stddef.h>

/* Maps zeroed shared memory on all ranks of node, or, with *out NULL, on none. Returns MPI's error
 * code; if that is one, ranks may differ. */
int hd_share(MPI_Comm node, size_t bytes, void **out);
/* Removes the name of the segment that MPICH has mapped. */
void hd_unlink_mpich_segment(void);

#endif
