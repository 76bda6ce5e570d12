/* Collectives that move data. */
#ifndef HD_MOVES_H
#define HD_MOVES_H

#include "hd_job.h"

int64_t hd_moves_stage(const hd_comm *c, const hd_job *j); /* bytes of hd_stage(), at most */
int hd_broadcast(hd_comm *c, hd_job *j);
int hd_all_gather(hd_comm *c, hd_job *j);
int hd_gather(hd_comm *c, hd_job *j);
int hd_scatter(hd_comm *c, hd_job *j);
int hd_all_to_all(hd_comm *c, hd_job *j);

#endif
