/* Factors before and after a reduction. */
#ifndef HD_SCALE_H
#define HD_SCALE_H

#include <stdint.h>

#include "hd_job.h"

/* Whether a factor is applied before the sum: for PREMUL_SUM, and for the AVG of float16, which
 * could overflow. */
int hd_scales_first(const hd_comm *c, const hd_job *j, double *factor);
/* Puts n elements that are to be reduced from one place into another, or leaves them in the same:
 * scaled where that comes first. */
void hd_scale_before(const hd_comm *c, const hd_job *j, void *to, const void *from, int64_t n);
/* AVG in all other cases. */
void hd_scale_after(const hd_comm *c, const hd_job *j, void *p, int64_t n);

#endif
