/* The page of a group is mapped, and its members leave it. */
#ifndef HD_PAGE_LIFE_H
#define HD_PAGE_LIFE_H

#include "hd_comm.h"

/* Collective over the group; leaves page NULL if it cannot be made. Returns MPI's error code. */
int hd_page_open(hd_comm *c);
void hd_page_close(hd_comm *c);
void hd_page_mark(hd_comm *c, int64_t unread); /* this member has left */
/* Waits some seconds for all members to free the group. 1: they do, and no message is left: the sum
 * of their `unread` is 0; 0: one is; 2: not all do yet; -1: a signal handler raised. In any case
 * this member has left. */
int hd_page_leave(hd_comm *c, int64_t unread, double seconds);
int hd_page_left(const hd_comm *c); /* the same without a wait; -1: not all yet */

#endif
