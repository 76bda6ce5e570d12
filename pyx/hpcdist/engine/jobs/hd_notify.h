/* Notifications of jobs that are done, for the thread that completes futures. */
#ifndef HD_NOTIFY_H
#define HD_NOTIFY_H

#include "hd_job.h"

/* Asks for a notification when j is done. 1: it will follow; 0: j is done already. */
int hd_job_watch(hd_job *j);
/* After a 0: waits until j's state says so, too, which is the finisher's next step. */
void hd_job_settle(const hd_job *j);
void hd_notify_push(hd_job *j);
hd_job *hd_notify_next(void); /* blocks; NULL: stopped */
void hd_notify_stop(void);

#endif
