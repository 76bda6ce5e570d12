/* Collectives that move data. */
#ifndef HD_MOVES_H
#define HD_MOVES_H

#include "hd_job.h"

int hd_broadcast(hd_comm *c, hd_job *j);
int hd_all_gather(hd_comm *c, hd_job *j);
int hd_gather(hd_comm *c, hd_job *j);
int hd_scatter(hd_comm *c, hd_job *j);
int hd_all_to_all(hd_comm *c, hd_job *j);

#endif
