/* Operations over two levels that move data without reducing it: see hd_levels_moves.c. For jobs
 * that hd_levels_takes() takes. */
#ifndef HD_LEVELS_MOVES_H
#define HD_LEVELS_MOVES_H

#include "hd_job.h"

int hd_levels_broadcast(hd_comm *c, hd_job *j);
/* Blocks of equal sizes, in a list or else in one tensor. This rank's is in its place already. */
int hd_levels_all_gather(hd_comm *c, hd_job *j, const hd_seg *list, hd_seg all);

#endif
