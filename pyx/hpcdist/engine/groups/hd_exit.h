/* The end of the process: libc's exit handler. */
#ifndef HD_EXIT_H
#define HD_EXIT_H

#include "hd_comm.h"

extern int hd_finalized; /* atomic: somebody in this process has come to MPI_Finalize */
/* Waits for what is in flight, and then no thread of hpcdist calls MPI any more. To be called
 * before MPI_Finalize; a second time it does nothing. */
void hd_exit_before_finalize(void);
/* Installs the libc exit handler, which finalizes or aborts by exit status. */
void hd_arm_exit(int owns_mpi);
/* The folder of the job's commits ("": as before), this rank, and how many ranks the node has: the
 * last of them that ends well removes the folder. */
void hd_exit_mark(const char *folder, int rank, int here);
int hd_in_child(void); /* 1 in a process forked after MPI started */
/* Notes that requests are left that no rank will match. */
void hd_session_poisoned(hd_session *s);
/* Whether ranks did not arrive when all were last to meet. */
void hd_exit_unmet(int is);

#endif
