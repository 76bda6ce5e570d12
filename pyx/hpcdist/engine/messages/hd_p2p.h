/* Point to point: sends and receives. */
#ifndef HD_P2P_H
#define HD_P2P_H

#include "hd_job.h"

int hd_p2p_start(hd_comm *c, hd_job *j); /* posts; may finish at once */
int hd_p2p_test(hd_job *j);              /* 1 done */
/* Set by the poller: tests the receives that no thread waits for and that go in two. Two ranks that
 * both wait for a long send first would otherwise wait for each other's poller. */
extern void (*hd_p2p_others)(void); /* atomic */
/* Set by hd_window.c: serves what other ranks ask of this one's windows. Two ranks that ask each
 * other do not wait for their servers then. */
extern void (*hd_p2p_serves)(void);   /* atomic */
int hd_p2p_is_brief(const hd_job *j); /* a call of MPI takes less than to leave the GIL */
/* With the GIL: tests a brief message, a few times if this thread may spin. */
int hd_p2p_soon(hd_job *j);
/* Waits; HD_OK, an error code, or -1 when `seconds` passed first (the job lives on). */
int hd_p2p_wait(hd_job *j, double seconds, int interruptible);
/* Cancels a receive. 1: cancelled; 0: it has ended, mostly well, because its message had arrived;
 * -1: its message is on its way, call again. The call takes up to `seconds`. */
int hd_p2p_take_back(hd_job *j, double seconds);
/* Ends the job, not the request: MPI may use the tensor for ever. */
void hd_p2p_give_up(hd_job *j);
/* A job that no thread waits for: 1 if it has ended, in time or not. */
int hd_p2p_look_after(hd_job *j);
void hd_p2p_end(hd_job *j); /* its group is being destroyed */

#endif
