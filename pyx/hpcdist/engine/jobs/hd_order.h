/* In which jobs the ranks' order decides about the bits of a result, and is kept: see
 * hd_ordered.h. */
#ifndef HD_ORDER_H
#define HD_ORDER_H

#include "hd_comm.h"
#include "hd_job.h"
#include "hd_types.h"

/* Two ranks have one order only, and sums of whole numbers are the same in any. */
static inline int hd_ordered(const hd_comm *c, const hd_job *j)
{
    return c->ordered && c->size > 2 && !c->on_device && j->dtype >= HD_FLOAT16 &&
           j->dtype <= HD_COMPLEX128 &&
           (j->redop == HD_PREMUL_SUM || (j->redop >= HD_SUM && j->redop <= HD_PRODUCT));
}

#endif
