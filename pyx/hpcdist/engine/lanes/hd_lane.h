/* The lane of a group: the order of its collectives. */
#ifndef HD_LANE_H
#define HD_LANE_H

#include "hd_job.h"

int hd_lane_try(hd_comm *c);             /* 1: the lane was empty and is now the caller's */
void hd_lane_leave(hd_comm *c);          /* gives it back without having run anything */
void hd_lane_run(hd_comm *c, hd_job *j); /* on a lane taken by hd_lane_try; gives it back */
/* Queues j for the lane's thread; errno-like; -1: the group is being destroyed. */
int hd_lane_submit(hd_comm *c, hd_job *j);
/* A signal handler raised in a synchronous call that had to queue. Returns its state until now. A
 * job still queued moves no data any more: when its turn comes it tells the other ranks, which
 * fail. One that runs ends soon unless all ranks have met. Only with the entry check. */
int hd_lane_take_back(hd_comm *c, hd_job *j);
/* Operations in flight may fail unseen: those begun from now on may run. */
void hd_lane_give_up(hd_comm *c);
/* The program has seen a failure: operations begun from now on may run. */
void hd_lane_seen(hd_comm *c);
int hd_lane_drain(hd_comm *c, double seconds); /* 1 empty, 0 not */
void hd_lane_close(hd_comm *c);
extern int hd_lane_jobs; /* atomic: jobs that lanes have been given and have not ended */

#endif
