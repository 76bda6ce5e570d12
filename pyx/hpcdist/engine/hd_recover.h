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

/* Around the making of a group, in a session that goes on after a death: Open MPI 5.0.11 may crash
 * if it hears of a revocation while a communicator is being made. So no recovery that knows of no
 * death revokes before all ranks' threads are outside, and none goes in while it waits for that.
 * hd_make_begin: HD_OK, or HD_ERR_FAILED, and the group cannot be made. */
int hd_make_begin(hd_session *s);
void hd_make_end(hd_session *s);
/* Whether a rank of this node recovers: what is being made would be of no use. */
int hd_make_vain(const hd_session *s);

/* Collective over the ranks of the session that live. The session breaks, and these ranks make a
 * new one, with one communicator of all of them. came_from: their former ranks of the session, in
 * order; room for all of them. */
int hd_comm_recover(hd_comm *c, const char *name, double timeout, hd_quota quota, hd_comm **out,
                    int *came_from, char *text, size_t room);

#endif
