/* Open MPI's launcher, PRRTE: its process on this node. */
#ifndef HD_PRTE_H
#define HD_PRTE_H

/* As a session opens; not again for those that follow it. */
void hd_prte_find(void);
/* It has gone, without the end of this process. */
int hd_prte_gone(void);
/* MPI ends, and the launcher may end before this process does. */
void hd_prte_leave(void);

#endif
