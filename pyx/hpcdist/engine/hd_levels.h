/* all_reduce over two levels, between nodes with several ranks each: see hd_levels.c. */
#ifndef HD_LEVELS_H
#define HD_LEVELS_H

#include <stdint.h>

#include "hd_job.h"

/* Whether HPCDIST_TWO_LEVEL asks for it. */
int hd_levels_wanted(void);

/* Whether j goes that way, and the reduction of one tensor. The first such call makes
 * communicators and memory, which is collective. -1: the job has failed. */
int hd_levels_takes(hd_comm *c, hd_job *j);
int hd_levels_all_reduce(hd_comm *c, hd_job *j, char *data, int64_t n);

/* Frees the memory; and later, where all ranks have left the group, the communicators. */
void hd_levels_close(hd_comm *c);
void hd_levels_free(hd_comm *c, int together);
int64_t hd_levels_bytes(const hd_comm *c); /* of memory; 0: there is none */

#endif
