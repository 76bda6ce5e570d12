/* Collectives that reduce. */
#ifndef HD_REDUCTIONS_H
#define HD_REDUCTIONS_H

#include "hd_job.h"

int64_t hd_reductions_stage(const hd_comm *c, const hd_job *j); /* bytes of hd_stage(), at most */
int hd_all_reduce(hd_comm *c, hd_job *j);
int hd_reduce(hd_comm *c, hd_job *j);
int hd_reduce_scatter(hd_comm *c, hd_job *j);
/* Memory for a reduce_scatter whose output lies in its input: HD_OK, or HD_ERR_MEMORY. Call it
 * before the ranks agree. */
int hd_scratch_for(const hd_comm *c, hd_job *j);

#endif
