/* Reductions through memory that the ranks of a node share: see hd_node.c. */
#ifndef HD_NODE_H
#define HD_NODE_H

#include <stdint.h>

#include "hd_job.h"

/* Whether j goes that way, and the reduction of one tensor. Allocates the memory if there is none
 * yet, which is collective. -1: the job has failed. */
int hd_node_takes(hd_comm *c, hd_job *j);
int hd_node_all_reduce(hd_comm *c, hd_job *j, char *data, int64_t n);
void hd_node_close(hd_comm *c);
int64_t hd_node_bytes(const hd_comm *c); /* 0: there is none */

#endif
