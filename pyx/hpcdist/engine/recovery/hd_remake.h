/* Groups are made again after a recovery, from those of their members that live. All ranks of the
 * default group make each of these calls, and all get the same code: HD_OK; HD_ERR_FAILED, because
 * a rank has died, and the recovery has to be repeated; or HD_ERR_BACKEND, because something else
 * has failed on one of them. None can be taken back: if it is not over within the group's timeout,
 * because a rank was stopped, the watchdog ends the job. */
#ifndef HD_REMAKE_H
#define HD_REMAKE_H

#include <stddef.h>
#include <stdint.h>

#include "hd_comm.h"

/* Gives the bytes of all ranks, one after the other: *all is the caller's to free. sizes: by rank;
 * NULL on a rank that has no memory for them, as `ranks` below. */
int hd_comm_exchange(hd_comm *c, const void *mine, int n, char **all, int *sizes);

/* Groups that have no member in common, in one call; this rank's has these ranks of `c`, in group
 * order. n: 0 on a rank that is in none of them. */
int hd_comm_remake(hd_comm *c, const int *ranks, int n, const char *name, double timeout, int check,
                   hd_comm **out, char *text, size_t room);

#endif
