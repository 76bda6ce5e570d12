/* The watchdog of a session, and the phases of an operation that it watches. */
#ifndef HD_WATCHDOG_H
#define HD_WATCHDOG_H

#include "hd_job.h"

/* 1: it runs; 0: this process has no thread or no descriptor left for it. */
int hd_watchdog_start(hd_session *s);
void hd_watchdog_stop(hd_session *s);

/* Brackets the phase that all ranks have agreed to and that cannot be cancelled: the watchdog ends
 * the job if it takes too long. */
void hd_data_begin(hd_comm *c, hd_job *j);
void hd_votes_begin(hd_comm *c, hd_job *j); /* the same, before the data */
void hd_data_end(hd_comm *c);

#endif
