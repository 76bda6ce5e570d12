/* The end of the process: libc's exit handler. */
#ifndef HD_EXIT_H
#define HD_EXIT_H

#include "hd_comm.h"

/* Installs the libc exit handler, which finalizes or aborts by exit status. */
void hd_arm_exit(int owns_mpi);
int hd_in_child(void); /* 1 in a process forked after MPI started */
/* Notes that requests are left that no rank will match. */
void hd_session_poisoned(hd_session *s);

#endif
