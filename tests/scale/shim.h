/* What SMPI lacks or simulates otherwise than real libraries, and the counts. Each of the engine's files is compiled
 * with this in front: its calls come here. */
#ifndef SHIM_H
#define SHIM_H

#include <mpi.h>
#include <stdint.h>
#include <time.h>

/* What this rank has sent and received since the last shim_reset(). */
typedef struct shim_counts {
    uint64_t sent, heard, bytes; /* bytes: sent */
} shim_counts;

extern shim_counts shim_counted;

/* Naps of a rank that waits last STRETCH times as long: they are most of what SMPI has to simulate. */
int shim_nap(const struct timespec *t);

int shim_isend(const void *data, int n, MPI_Datatype type, int to, int tag, MPI_Comm comm, MPI_Request *req);
int shim_irecv(void *data, int n, MPI_Datatype type, int from, int tag, MPI_Comm comm, MPI_Request *req);
int shim_improbe(int from, int tag, MPI_Comm comm, int *flag, MPI_Message *message, MPI_Status *st);
int shim_mrecv(void *data, int n, MPI_Datatype type, MPI_Message *message, MPI_Status *st);
int shim_test(MPI_Request *req, int *flag, MPI_Status *st);
int shim_testall(int n, MPI_Request *req, int *flag, MPI_Status *st);
int shim_iallreduce(const void *in, void *out, int n, MPI_Datatype type, MPI_Op op, MPI_Comm comm, MPI_Request *req);
int shim_iallgather(const void *in, int n, MPI_Datatype type, void *out, int m, MPI_Datatype of, MPI_Comm comm,
                    MPI_Request *req);
int shim_idup(MPI_Comm comm, MPI_Comm *copy, MPI_Request *req);
int shim_dup(MPI_Comm comm, MPI_Comm *copy);

#undef nanosleep
#define nanosleep(t, left) shim_nap(t)
#define MPI_Isend shim_isend
#define MPI_Irecv shim_irecv
#define MPI_Improbe shim_improbe
#define MPI_Mrecv shim_mrecv
#define MPI_Test shim_test
#define MPI_Testall shim_testall
#define MPI_Iallreduce shim_iallreduce
#define MPI_Iallgather shim_iallgather
#define MPI_Comm_idup shim_idup
#define MPI_Comm_dup shim_dup

#endif
