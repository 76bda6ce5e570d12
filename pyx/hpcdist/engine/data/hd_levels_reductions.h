/* Reductions over two levels: see hd_levels_reductions.c. For jobs that hd_levels_takes() takes. */
#ifndef HD_LEVELS_REDUCTIONS_H
#define HD_LEVELS_REDUCTIONS_H

#include "hd_job.h"

int hd_levels_all_reduce(hd_comm *c, hd_job *j, char *from, hd_seg to); /* of one tensor */
int hd_levels_reduce(hd_comm *c, hd_job *j);
/* Of blocks of equal sizes. No other block of the input lies in `to`. */
int hd_levels_reduce_scatter(hd_comm *c, hd_job *j, char *to);

#endif
