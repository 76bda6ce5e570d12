/* Whether the other rank of a message can still send or receive it, or its memory be used. */
#ifndef HD_PEER_H
#define HD_PEER_H

#include <stdint.h>

#include "hd_job.h"

/* Each fails the job, and returns 1, if not. */
int hd_peer_gone(hd_job *j);   /* it has died, or left the job */
int hd_peer_closed(hd_job *j); /* it has left the group, some time ago; with j->message.mu held */

/* "to" or "from", for errors about the peer. */
const char *hd_peer_is(const hd_job *j);

/* Whether a rank whose window memory is about to be used has gone, or has left the group. */
int hd_peer_has_withdrawn(const hd_comm *c, int rank);
void hd_peer_withdrawn(hd_job *j, int rank); /* fails the job that would use it */

#endif
