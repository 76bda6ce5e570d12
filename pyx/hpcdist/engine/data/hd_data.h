/* What all files of the data phase use: MPI calls and waits for them, a staging buffer, types for
 * long messages.
 *
 * Which MPI calls are made must not depend on what only one rank knows, such as where its tensors
 * lie: forms are chosen by kind and agreed sizes alone. Calls block, unless the library would spin
 * on a core that the peer it waits for needs. Then they are nonblocking and polled with yields
 * (hd_job.polls, also agreed). */
#ifndef HD_DATA_H
#define HD_DATA_H

#include <stdint.h>

#include "hd_job.h"
#include "hd_threads.h"

#define MOVE_MAX (1ll << 30) /* elements of one MPI call */

/* CALL(c, j, Allreduce, arguments...) is MPI_Allreduce, or MPI_Iallreduce and a poll. The arguments
 * of both forms are the same but for the request at the end. */
#define CALL(c, j, NAME, INAME, ...)                                                               \
    do {                                                                                           \
        int rc_;                                                                                   \
        if (!(j)->polls) {                                                                         \
            hd_mpi_lock((c)->session);                                                             \
            rc_ = MPI_##NAME(__VA_ARGS__);                                                         \
            hd_mpi_unlock((c)->session);                                                           \
            if (hd_mpi_failed(j, rc_, "MPI_" #NAME))                                               \
                return (j)->code;                                                                  \
        } else {                                                                                   \
            MPI_Request rq_;                                                                       \
            hd_mpi_lock((c)->session);                                                             \
            rc_ = MPI_##INAME(__VA_ARGS__, &rq_);                                                  \
            hd_mpi_unlock((c)->session);                                                           \
            if (hd_mpi_failed(j, rc_, "MPI_" #INAME) || hd_poll(c, j, &rq_))                       \
                return (j)->code;                                                                  \
        }                                                                                          \
    } while (0)

int hd_poll(hd_comm *c, hd_job *j, MPI_Request *req);
int hd_wait_all(hd_comm *c, hd_job *j, int n, MPI_Request *reqs);
MPI_Datatype hd_big_type(int64_t bytes); /* a committed type of that many bytes */

int hd_all_equal(const hd_seg *list, int n); /* whether all of the list are as long */

/* 0: it cannot be used. Intel MPI 2021.18: the ring by which its Iallgatherv moves large blocks
 * never ends with three ranks or more if their sizes differ. */
int hd_has_allgatherv(void);

/* A buffer of the communicator, for the thread that holds the lane. It grows; NULL fails the job.
 * Before the ranks agree, hd_reductions_stage() and hd_moves_stage() tell how much a job takes at
 * most. */
char *hd_stage(hd_comm *c, hd_job *j, int64_t bytes);

#endif
