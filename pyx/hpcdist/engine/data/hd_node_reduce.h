/* Reductions through memory that the ranks of a node share: see hd_node_reduce.c. */
#ifndef HD_NODE_REDUCE_H
#define HD_NODE_REDUCE_H

#include <stdint.h>

#include "hd_job.h"

/* Whether j goes that way, and the reduction of one tensor, in place or into another one, or, on a
 * rank that gets no result, into none. Allocates the memory if there is none yet, which is
 * collective. -1: the job has failed. */
int hd_node_takes(hd_comm *c, hd_job *j);
int hd_node_reduce(hd_comm *c, hd_job *j, const char *from, char *to, int64_t n);

#endif
