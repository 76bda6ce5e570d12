/* The entry check: before data moves, the ranks of a group agree on what they are about to do. */
#ifndef HD_CHECK_H
#define HD_CHECK_H

#include <stdint.h>

#include "hd_job.h"

/* Agrees on the call. HD_OK, or an error code with j->text. j->uneven becomes true if the counts of
 * any rank differ (verify pair by pair, unless j->checked.verified), j->polls if any rank has to
 * poll, and j->checked.carried if the data has moved. */
int hd_check(hd_comm *c, hd_job *j, uint64_t fingerprint);

#endif
