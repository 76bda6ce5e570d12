/* HPCDIST_DETERMINISTIC=layout: the sums of floating-point numbers have the same bits wherever the
 * ranks are, on one node or on many. All of them are made in one order, that of the ranks, as
 * hd_node_reduce.c and hd_carry.c make them within a node. No node, and no library, adds up what
 * some of the ranks have: each rank gets what all ranks have for a part of the tensor.
 *
 * A rank receives as many bytes as in a ring, and of short tensors what all ranks have. What
 * crosses the network is not less where ranks share a node. */
#ifndef HD_ORDERED_H
#define HD_ORDERED_H

#include <stdint.h>

#include "hd_job.h"

int hd_ordered_wanted(void);

/* For jobs with an order: see hd_order.h. Bytes of hd_stage(), the same on all ranks. */
int64_t hd_ordered_stage(const hd_comm *c, const hd_job *j);
/* Of one tensor; `to` may be `from`. */
int hd_ordered_all_reduce(hd_comm *c, hd_job *j, const char *from, char *to, int64_t n);
int hd_ordered_reduce(hd_comm *c, hd_job *j);
/* This rank's block of the input may lie in `to`, and no other. */
int hd_ordered_reduce_scatter(hd_comm *c, hd_job *j, char *to);

#endif
