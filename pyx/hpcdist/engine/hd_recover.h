/* What the ranks that are left do after a death: they agree, and make a new session. See hd_ft.h.
 */
#ifndef HD_RECOVER_H
#define HD_RECOVER_H

#include "hd_comm.h"
#include "hd_cpus.h"

/* *flag becomes the bitwise and of the flags of all ranks of the group that live. It works in a
 * broken session, too. After HD_ERR_TIMEOUT or HD_ERR_INTERRUPT the next call goes on with the same
 * agreement, and the flag given first. */
int hd_comm_agree(hd_comm *c, int *flag, double timeout, char *text, size_t room);

/* Collective over the ranks of the session that live. The session breaks, and these ranks make a
 * new one, with one communicator of all of them. came_from: their former ranks of the session, in
 * order; room for all of them. */
int hd_comm_recover(hd_comm *c, const char *name, double timeout, hd_quota quota, hd_comm **out,
                    int *came_from, char *text, size_t room);

#endif
