/* MPICH reads a large message from the sender's memory (CMA, process_vm_readv), and does not ask
 * whether it may: where the system refuses, in a container or by a seccomp filter, the receive
 * fails; where the process id is another process's in this PID namespace, the memory read is that
 * one's. Here each rank tries it on its neighbour, which finds every border between the ranks of
 * a node. Open MPI asks by itself, and its MPI_T_init_thread would take the level named there for
 * the level of the whole library. */
#define _GNU_SOURCE
#include <stdint.h>
#include <stdlib.h>
#include <sys/uio.h>
#include <unistd.h>

#include "hd_base.h"
#include "hd_cma.h"

#ifdef OPEN_MPI

void hd_cma_try(MPI_Comm node) { (void)node; }

#else

typedef struct offer {
    uint64_t pid, at, word;
} offer;

static uint64_t word; /* what the neighbour should find */

static int may_copy(const offer *o)
{
    uint64_t found = 0;
    struct iovec here = {&found, sizeof found},
                 there = {(void *)(uintptr_t)o->at, sizeof found}; /* NOLINT */
    const pid_t pid = (pid_t)o->pid;
    return process_vm_readv(pid, &here, 1, &there, 1, 0) == sizeof found && found == o->word &&
           process_vm_writev(pid, &here, 1, &there, 1, 0) == sizeof found;
}

/* The variable is looked at with each message. */
static void turn_off(int index)
{
    MPI_T_cvar_handle handle;
    int count = 0, off = 0;
    if (MPI_T_cvar_handle_alloc(index, NULL, &handle, &count))
        return;
    if (count == 1)
        MPI_T_cvar_write(handle, &off);
    MPI_T_cvar_handle_free(&handle);
}

void hd_cma_try(MPI_Comm node)
{
    int level, index = -1, rank, n, ok;
    offer mine, *all;

    MPI_Comm_rank(node, &rank);
    MPI_Comm_size(node, &n);
    if (n < 2 || MPI_T_init_thread(MPI_THREAD_MULTIPLE, &level))
        return;
    if (MPI_T_cvar_get_index("MPIR_CVAR_CH4_CMA_ENABLE", &index) == MPI_SUCCESS) {
        word = hd_random64();
        mine = (offer){(uint64_t)getpid(), (uint64_t)(uintptr_t)&word, word};
        all = calloc((size_t)n, sizeof *all);
        ok = all != NULL;
        MPI_Allreduce(MPI_IN_PLACE, &ok, 1, MPI_INT, MPI_MIN, node);
        if (ok) {
            MPI_Allgather(&mine, 3, MPI_UINT64_T, all, 3, MPI_UINT64_T, node);
            ok = may_copy(&all[(rank + 1) % n]);
            MPI_Allreduce(MPI_IN_PLACE, &ok, 1, MPI_INT, MPI_MIN, node);
            if (!ok)
                turn_off(index);
        }
        free(all);
    }
    MPI_T_finalize();
}

#endif
