/* The page of a group is mapped, and its members leave it. */
#ifndef HD_PAGE_LIFE_H
#define HD_PAGE_LIFE_H

#include "hd_comm.h"
#include "hd_page.h"

/* Collective over the group; leaves page NULL if it cannot be made. Returns MPI's error code. */
int hd_page_open(hd_comm *c);
void hd_page_close(hd_comm *c);
void hd_page_mark(hd_comm *c, int64_t unread, enum hd_closed how); /* this member has left */
/* `unread` of a member with calls that have not ended: the sum is never 0. */
#define HD_UNDRAINED ((int64_t)1 << 40)
/* MPI's communicator is kept, unless all members free the group and no message is left, so that the
 * sum of their `unread` is 0: MPI would give its number to the next communicator, and with it the
 * messages that are still on their way. HD_LATER: this member has shown that it leaves, and not all
 * have: see hd_graves.h. */
enum hd_parting { HD_KEEP = 0, HD_TOGETHER, HD_LATER };
/* Waits some seconds for all members to free the group. An enum hd_parting, or -1: a signal handler
 * raised. In any case this member has left. */
int hd_page_leave(hd_comm *c, int64_t unread, double seconds);
int hd_page_left(const hd_comm *c); /* the same without a wait; -1: not all yet */

#endif
