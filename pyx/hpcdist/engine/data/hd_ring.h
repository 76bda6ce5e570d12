/* A long all_reduce as a ring of messages: see hd_ring.c. */
#ifndef HD_RING_H
#define HD_RING_H

#include <stdint.h>

#include "hd_job.h"

/* Whether j, which is polled, qualifies for it, and the reduction of one tensor. */
int hd_ring_qualifies(const hd_comm *c, const hd_job *j);
int64_t hd_ring_stage(void); /* bytes of hd_stage() */
int hd_ring_all_reduce(hd_comm *c, hd_job *j, char *data, int64_t n);

#endif
