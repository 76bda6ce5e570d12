/* Who makes the others wait: for each group, how long this rank has waited for each member in the
 * entry check. A wait that reads no clock (less than 50 us) does not count. */
#ifndef HD_LATE_H
#define HD_LATE_H

#include <stdint.h>

#include "hd_comm.h"
#include "hd_job.h"

/* Set once, before the first session: the share of the time (0: off), and over how many seconds. */
void hd_late_wish(double share, double seconds);

/* This rank has waited for `rank` of the group for `ns`, and goes on (`more`) or has it now. By the
 * thread that has the lane. */
void hd_late_waited(hd_comm *c, const hd_job *j, int rank, int64_t ns, int more);

/* By the watchdog on each tick, with the session's mutex: says a warning into t, once per node, if
 * a rank makes this one wait for more than that share of the time. Writing it may take a while, so
 * the caller does that without the mutex. */
void hd_late_look(hd_session *s, int64_t now, hd_text *t);

void hd_late_free(hd_comm *c);

#endif
