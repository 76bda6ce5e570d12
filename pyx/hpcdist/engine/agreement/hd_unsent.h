/* Messages of entry checks between nodes that a rank has left before MPI could send them. MPI sends
 * them only while somebody is inside it: so the poller's thread is, while the program computes. A
 * rank that was stopped meanwhile would otherwise wait for a vote as long as the program pleases.
 *
 * As long as a post is kept here, it is the poller's. Whoever uses it takes it first. */
#ifndef HD_UNSENT_H
#define HD_UNSENT_H

#include "hd_post.h"

/* 1: something is unsent, and the post is kept. */
int hd_unsent_keep(hd_post *p);
void hd_unsent_take(hd_post *p); /* NULL: there is none */
/* For the poller: lets MPI send, and lets go of the posts of which everything has gone. */
void hd_unsent_look_after(void);
int hd_unsent_any(void); /* whether posts are kept */

#endif
