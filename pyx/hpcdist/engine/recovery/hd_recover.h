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
 * new one, with one communicator of all active ones. came_from: by new rank, the former one of the
 * session; place: whose number it has, see hd_spares_assign(). Both have room for all former ranks.
 * wish: HD_REBUILDS or HD_LOSES; becomes that of all ranks, or 0 if theirs differ.
 *
 * A spare calls it, too, and waits in it, asleep, until the others do. It gets a communicator of
 * the active ranks if it is one of them now, else one of the spares. HD_ERR_CLOSED: the active
 * ranks have ended. HD_ERR_FAILED: none of them is left. */
int hd_comm_recover(hd_comm *c, const char *name, double timeout, hd_quota quota, int *wish,
                    hd_comm **out, int *came_from, int *place, char *text, size_t room);

/* At the start: the last ranks of the session become spares. Collective over the communicator of
 * all ranks, which stays. Gives one of the others, or on a spare one of the spares. */
int hd_comm_set_aside(hd_comm *all, int spares, const char *name, hd_comm **out, char *text,
                      size_t room);

#endif
