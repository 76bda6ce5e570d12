/* Shared by reductions and moves: waiting for MPI, a staging buffer, types for long messages. */
#include <sched.h>
#include <stdlib.h>
#include <string.h>

#include "hd_base.h"
#include "hd_comm.h"
#include "hd_data.h"
#include "hd_job.h"
#include "hd_threads.h"

/* Between two looks at MPI, where the core is needed elsewhere. A lane between nodes leaves the
 * core to the thread that computes; within a node it leaves it to the peer it waits for, which
 * arrives soon. */
static void leave_core(const hd_comm *c, const hd_job *j, hd_nap *nap)
{
    if (j->inline_ || c->page)
        sched_yield();
    else
        hd_nap_step(nap);
}

int hd_poll(hd_comm *c, hd_job *j, MPI_Request *req)
{
    hd_nap nap = {0};
    const int spins = hd_session_spin(c->session, !j->inline_) ? 2000 : 4;
    int done = 0, rc;
    for (int k = 0;; k++) {
        hd_mpi_lock(c->session);
        rc = MPI_Test(req, &done, MPI_STATUS_IGNORE);
        hd_mpi_unlock(c->session);
        if (hd_mpi_failed(j, rc, "MPI_Test"))
            return j->code;
        if (done)
            return HD_OK;
        if (k >= spins)
            leave_core(c, j, &nap);
    }
}

int hd_wait_all(hd_comm *c, hd_job *j, int n, MPI_Request *reqs)
{
    int done = 0, rc;
    hd_nap nap = {0};
    if (!j->polls) {
        hd_mpi_lock(c->session);
        rc = MPI_Waitall(n, reqs, MPI_STATUSES_IGNORE);
        hd_mpi_unlock(c->session);
        return hd_mpi_failed(j, rc, "MPI_Waitall") ? j->code : HD_OK;
    }
    while (!done) {
        hd_mpi_lock(c->session);
        rc = MPI_Testall(n, reqs, &done, MPI_STATUSES_IGNORE);
        hd_mpi_unlock(c->session);
        if (hd_mpi_failed(j, rc, "MPI_Testall"))
            return j->code;
        if (!done)
            leave_core(c, j, &nap);
    }
    return HD_OK;
}

char *hd_stage(hd_comm *c, hd_job *j, int64_t bytes)
{
    if ((int64_t)c->staging_bytes < bytes) {
        free(c->staging);
        c->staging = malloc((size_t)bytes);
        c->staging_bytes = c->staging ? (size_t)bytes : 0;
        if (!c->staging)
            hd_fail(j, HD_ERR_MEMORY, "no memory for a staging buffer of %lld bytes in %s",
                    (long long)bytes, j->api);
    }
    return c->staging;
}

int hd_all_equal(const hd_seg *list, int n)
{
    for (int i = 1; i < n; i++)
        if (list[i].n != list[0].n)
            return 0;
    return 1;
}

MPI_Datatype hd_big_type(int64_t bytes)
{
    const int64_t block = 1 << 30;
    const int blocks = (int)(bytes / block), rest = (int)(bytes % block);
    MPI_Datatype unit, parts[2], whole;
    int lengths[2] = {blocks, rest};
    MPI_Aint at[2] = {0, (MPI_Aint)blocks * block};

    MPI_Type_contiguous((int)block, MPI_BYTE, &unit);
    parts[0] = unit;
    parts[1] = MPI_BYTE;
    MPI_Type_create_struct(2, lengths, at, parts, &whole);
    MPI_Type_commit(&whole);
    MPI_Type_free(&unit);
    return whole;
}

int hd_has_allgatherv(void)
{
    static int known; /* 1: no, 2: yes */
    int found = __atomic_load_n(&known, __ATOMIC_RELAXED);
    if (!found) {
        char version[MPI_MAX_LIBRARY_VERSION_STRING];
        int length = 0;
        found =
            MPI_Get_library_version(version, &length) || !strstr(version, "Intel(R) MPI") ? 2 : 1;
        __atomic_store_n(&known, found, __ATOMIC_RELAXED);
    }
    return found == 2;
}
