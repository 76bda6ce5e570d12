/* Processes of this node that are stopped, by SIGSTOP for example. In a job that goes on without a
 * rank that dies, a timeout ends those: its ranks go on without them, and none of them ever takes
 * part by half. Source: man 5 proc_pid_stat, state T. A process that a debugger has stopped (t) is
 * left alone. */
#ifndef HD_STOPPED_H
#define HD_STOPPED_H

#include <stdint.h>
#include <sys/types.h>

#include "hd_comm.h"
#include "hd_job.h"

/* By the watchdog on each tick, in such a job. */
void hd_stopped_look(hd_session *s);

/* After a timeout: ends the processes that have been stopped for a second in which this one ran.
 * Gives the time in ns until which to wait longer, because one of them, which this rank or another
 * one has ended, is about to be told as dead, or may be on another node; 0: there was none. */
int64_t hd_stopped_end(hd_session *s);

/* The job has timed out. If that was because of such a process, waits for its death, and the job
 * has failed because of that instead. */
void hd_stopped_explain(hd_comm *c, hd_job *j);

/* The same of another call. Whether a rank has died. */
int hd_stopped_explains(hd_session *s);

#endif
