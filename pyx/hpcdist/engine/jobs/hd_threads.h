/* What a thread of this session may do: call MPI beside another thread, spin, let MPI make
 * progress. */
#ifndef HD_THREADS_H
#define HD_THREADS_H

#include "hd_comm.h"

int hd_session_serialized(const hd_session *s); /* below MPI_THREAD_MULTIPLE */
/* Then one thread at a time. */
/* Around each call of MPI's that may move data: one thread at a time where MPI wants that, and sums
 * that do not depend on the thread in which MPI happens to add. */
void hd_mpi_lock(const hd_session *s);
void hd_mpi_unlock(const hd_session *s);
/* Whether a wait may spin: on the caller's thread, or on the lane's. */
int hd_session_spin(const hd_session *s, int lane);
void hd_session_progress(hd_session *s); /* lets MPI move messages; cheap */

#endif
