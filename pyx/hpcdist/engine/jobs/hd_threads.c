/* What a thread of a session may do: see hd_threads.h. */
#include "hd_threads.h"
#include "hd_comm.h"
#include "hd_float_mode.h"
#include "hd_session.h"

int hd_session_serialized(const hd_session *s) { return s->serialized; }
int hd_session_spin(const hd_session *s, int lane) { return lane ? s->lane_spin : s->spin; }

/* What the program has set in a thread that is inside MPI, where it may add for a collective of any
 * other thread. */
static __thread hd_float_mode outside;

void hd_mpi_lock(const hd_session *s)
{
    if (s->serialized)
        pthread_mutex_lock((pthread_mutex_t *)&s->mpi_mu);
    outside = hd_float_mode_plain();
}

void hd_mpi_unlock(const hd_session *s)
{
    if (outside)
        hd_float_mode_restore(outside);
    if (s->serialized)
        pthread_mutex_unlock((pthread_mutex_t *)&s->mpi_mu);
}

void hd_session_progress(hd_session *s)
{
    int flag;
    hd_mpi_lock(s);
    MPI_Iprobe(MPI_ANY_SOURCE, 0, s->ctl, &flag, MPI_STATUS_IGNORE);
    hd_mpi_unlock(s);
}
