/* The entry check: before data moves, the ranks of a group agree on what they are about to do. */
#ifndef HD_CHECK_H
#define HD_CHECK_H

#include <stdint.h>

#include "hd_job.h"

/* A call of a few bytes per rank, whose data the check moves. */
typedef struct hd_carry {
    int small; /* no rank's contribution is longer than HD_SMALL, as the fingerprint says */
    /* Writes this rank's contribution, before the outcome is known. */
    void (*give)(const hd_comm *c, const hd_job *j, char *to);
    /* Takes what is for this rank out of the contributions of all, in a check of that parity. */
    void (*take)(const hd_comm *c, const hd_job *j, const char *const *from, int parity);
} hd_carry;

/* Agrees on the call. HD_OK, or an error code with j->text. j->uneven becomes true if the counts of
 * any rank differ (verify pair by pair, unless j->checked.verified), j->polls if any rank has to
 * poll, and j->checked.carried if the data has moved. */
int hd_check(hd_comm *c, hd_job *j, uint64_t fingerprint);

#endif
