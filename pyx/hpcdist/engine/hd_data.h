/* Internals of the data phase, shared by hd_exec.c, hd_reductions.c and hd_moves.c only.
 *
 * Which MPI calls are made must not depend on what only one rank knows, such as where its tensors
 * lie: forms are chosen by kind and agreed sizes alone. Calls block, unless the library would spin
 * on a core that the peer it waits for needs. Then they are nonblocking and polled with yields
 * (hd_job.polls, also agreed). */
#ifndef HD_DATA_H
#define HD_DATA_H

#include <limits.h>

#include "hd_engine.h"
#include "hd_kernels.h"
#include "hd_mpi_ops.h"

#define MOVE_MAX (1ll << 30) /* elements of one MPI call */

/* CALL(c, j, Allreduce, arguments...) is MPI_Allreduce, or MPI_Iallreduce and a poll. The arguments of
 * both forms are the same but for the request at the end. */
#define CALL(c, j, NAME, INAME, ...)                                                                       \
    do {                                                                                                   \
        int rc_;                                                                                           \
        if (!(j)->polls) {                                                                                 \
            hd_mpi_lock((c)->session);                                                                     \
            rc_ = MPI_##NAME(__VA_ARGS__);                                                                 \
            hd_mpi_unlock((c)->session);                                                                   \
            if (hd_mpi_failed(j, rc_, "MPI_" #NAME))                                                       \
                return (j)->code;                                                                          \
        } else {                                                                                           \
            MPI_Request rq_;                                                                               \
            hd_mpi_lock((c)->session);                                                                     \
            rc_ = MPI_##INAME(__VA_ARGS__, &rq_);                                                          \
            hd_mpi_unlock((c)->session);                                                                   \
            if (hd_mpi_failed(j, rc_, "MPI_" #INAME) || hd_poll(c, j, &rq_))                               \
                return (j)->code;                                                                          \
        }                                                                                                  \
    } while (0)

int hd_all_reduce(hd_comm *c, hd_job *j);
/* The ring, an all_reduce that is polled: whether j qualifies for it, and the reduction of one
 * tensor. */
int hd_ring_fits(const hd_comm *c, const hd_job *j);
int hd_ring_all_reduce(hd_comm *c, hd_job *j, char *data, int64_t n);
/* Through the node's memory: whether j goes that way, and the reduction of one tensor. Allocates the
 * memory if there is none yet, which is collective. -1: the job has failed. */
int hd_node_takes(hd_comm *c, hd_job *j);
int hd_node_all_reduce(hd_comm *c, hd_job *j, char *data, int64_t n);
int hd_reduce(hd_comm *c, hd_job *j);
int hd_reduce_scatter(hd_comm *c, hd_job *j);
int hd_broadcast(hd_comm *c, hd_job *j);
int hd_all_gather(hd_comm *c, hd_job *j);
int hd_gather(hd_comm *c, hd_job *j);
int hd_scatter(hd_comm *c, hd_job *j);
int hd_all_to_all(hd_comm *c, hd_job *j);

/* Whether a factor is applied before the sum: for PREMUL_SUM, and for the AVG of float16, which
 * could overflow. */
int hd_scales_first(const hd_comm *c, const hd_job *j, double *factor);
/* AVG in all other cases. */
void hd_scale_after(const hd_comm *c, const hd_job *j, void *p, int64_t n);

/* A buffer of the communicator, for the thread that holds the lane. It grows; NULL fails the
 * job. */
char *hd_stage(hd_comm *c, hd_job *j, int64_t bytes);

#endif
