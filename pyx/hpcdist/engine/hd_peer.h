/* Whether the other rank of a message can still send or receive it. Each fails the job, and returns
 * 1, if not. */
#ifndef HD_PEER_H
#define HD_PEER_H

#include <stdint.h>

#include "hd_job.h"

int hd_peer_gone(hd_job *j);   /* it has died, or left the job */
int hd_peer_closed(hd_job *j); /* it has left the group, some time ago; with j->message.mu held */

#endif
