/* What two ranks must agree on if sizes differ between ranks. */
#ifndef HD_PAIRS_H
#define HD_PAIRS_H

#include <stdint.h>

#include "hd_job.h"

/* What the entry check compares beside the fingerprint: the count, and for pairwise calls also
 * shape and strides. */
int64_t hd_agreed(const hd_job *j);
int hd_verify_pairs(hd_comm *c, hd_job *j); /* uneven counts: what I send is what you expect */

#endif
