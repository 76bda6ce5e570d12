/* What all ranks of a job must set alike. They compare it when the default group is made, or one of
 * a communicator. */
#ifndef HD_SETTINGS_H
#define HD_SETTINGS_H

#include <stddef.h>
#include <stdint.h>

#include "hd_comm.h"

/* Whether HPCDIST_CHECK_TRANSPORT lets MPI carry the entry check also within a node. */
int hd_checks_by_mpi(void);
/* This rank's settings, with the group's level of the check. */
uint64_t hd_settings_own(const hd_comm *c);
/* Says in which setting rank `wrong` differs from rank 0. */
void hd_settings_disagree(const hd_comm *c, uint64_t first, int wrong, uint64_t other, char *text,
                          size_t room);

#endif
