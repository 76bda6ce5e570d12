/* Tensors of one call that share memory. */
#ifndef HD_ALIAS_H
#define HD_ALIAS_H

#include <stdint.h>

#include "hd_job.h"

/* Whether two segments of a list overlap, and which; -1: no memory to find out. */
int hd_overlap(const hd_seg *list, int n, int64_t item, int *one, int *other);
/* The output that input i may lie in: first + i * step; with `exact` it must begin where that
 * output begins. */
typedef struct hd_own {
    int first, step, exact;
} hd_own;
/* Whether an input lies in an output that is not its own, and which; the outputs do not overlap. -1
 * as above. */
int hd_input_in_output(const hd_seg *in, int nin, const hd_seg *out, int nout, int64_t item,
                       hd_own own, int *one, int *other);

#endif
