/* Groups that this rank has left, and other members perhaps not yet. Their communicators are freed
 * as soon as all have, at the creation or the end of a later group. */
#ifndef HD_GRAVES_H
#define HD_GRAVES_H

#include "hd_comm.h"

/* This rank goes on to leave the group, and not all do: tells the others, if it can. */
void hd_grave_tell(hd_comm *c);
void hd_grave_dig(hd_comm *c); /* instead of freeing its communicator, its page and its post */
/* Frees what all members have left. Without blocking. */
void hd_graves_visit(hd_session *s);
void hd_graves_close(hd_session *s); /* the session ends: what is left is kept by MPI */
/* The last owner has gone. 1: the group is buried, and freed later. */
int hd_grave_inherits(hd_comm *c);
void hd_comm_dispose(hd_comm *c); /* frees the struct */

#endif
