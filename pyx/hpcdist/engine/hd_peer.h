/* Whether the other rank of a message can still send or receive it, or its memory be used. Each
 * fails the job, and returns 1, if not. */
#ifndef HD_PEER_H
#define HD_PEER_H

#include <stdint.h>

#include "hd_job.h"

int hd_peer_gone(hd_job *j);   /* it has died, or left the job */
int hd_peer_closed(hd_job *j); /* it has left the group, some time ago; with j->message.mu held */

/* The rank whose window memory the job is about to use has gone, or has left the group. */
int hd_peer_withdrawn(hd_job *j, int rank);

#endif
