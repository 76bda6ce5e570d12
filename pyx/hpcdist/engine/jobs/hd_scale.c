/* The factors of AVG and PREMUL_SUM: before the sum, or after it. */
#include <string.h>

#include "hd_comm.h"
#include "hd_job.h"
#include "hd_kernels.h"
#include "hd_scale.h"
#include "hd_types.h"

int hd_scales_first(const hd_comm *c, const hd_job *j, double *factor)
{
    if (j->redop == HD_PREMUL_SUM) {
        *factor = j->factor;
        return 1;
    }
    if (j->redop == HD_AVG && j->dtype == HD_FLOAT16 && c->size > 1) {
        *factor = 1.0 / c->size;
        return 1;
    }
    return 0;
}

void hd_scale_before(const hd_comm *c, const hd_job *j, void *to, const void *from, int64_t n)
{
    double factor;
    if (n == 0)
        return;
    if (hd_scales_first(c, j, &factor))
        hd_scale_mul(to, from, n, j->dtype, factor);
    else if (to != from)
        memcpy(to, from, (size_t)n * hd_itemsize(j->dtype));
}

void hd_scale_after(const hd_comm *c, const hd_job *j, void *p, int64_t n)
{
    if (j->redop == HD_AVG && j->dtype != HD_FLOAT16 && c->size > 1)
        hd_scale_div(p, n, j->dtype, c->size);
}
