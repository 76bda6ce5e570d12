/* The poller: what is in flight and no thread waits for. */
#ifndef HD_POLLER_H
#define HD_POLLER_H

#include "hd_job.h"
#include "hd_post.h"

/* Leaves jobs of one session, linked by `next`, to the poller thread; NULL: none. */
void hd_p2p_watch(hd_job *first);
/* 1: took back a job that has ended, before the poller saw it; the caller has its reference
 * too. */
int hd_p2p_unwatch(hd_job *j);
int hd_p2p_drain(hd_comm *c, double seconds); /* no request of c (NULL: of any) is left; 1 yes */

/* Cancels the receives of c whose messages have not arrived, if no send is in flight. Does not
 * wait. */
void hd_p2p_recall(hd_comm *c);
/* Cancels all receives of c (NULL: of all groups) and gives up the sends; 1: MPI is done with all
 * of them. */
int hd_p2p_close(hd_comm *c);
int hd_p2p_shutdown(void); /* the poller has left MPI for ever; 1: it has */

/* A thread that has left a check: what MPI has not sent of it is the poller's task. */
void hd_poller_sends(hd_comm *c);

extern int hd_callers; /* atomic: of all groups, see hd_comm_enter */

#endif
