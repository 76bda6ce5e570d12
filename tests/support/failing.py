"""A library to preload in which the engine gets no memory, or MPI makes no communicator.

A program sets ``no_memory`` or ``no_split`` in the library, on the rank concerned. ``freed`` counts
what MPI_Comm_split has made and the rank has freed.
"""

from __future__ import annotations

from pathlib import Path

from preloading import preload

SOURCE = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <mpi.h>
#include <stdlib.h>
#include <string.h>
int no_memory, no_split, freed;
static MPI_Comm made = MPI_COMM_NULL;
void *__libc_calloc(size_t, size_t);

void *calloc(size_t n, size_t size)
{
    Dl_info by;
    if (no_memory && dladdr(__builtin_return_address(0), &by) && strstr(by.dli_fname, "_engine"))
        return NULL;
    return __libc_calloc(n, size);
}

/* hpcdist's loader has put it in no global scope. */
static void *real(const char *name)
{
    return dlsym(dlopen("libmpi.so.40", RTLD_NOW | RTLD_NOLOAD), name);
}
#define REAL(name) ((__typeof__(&name))real("P" #name))
int MPI_Comm_split(MPI_Comm from, int color, int key, MPI_Comm *out)
{
    const int rc = REAL(MPI_Comm_split)(from, color, key, out);
    if (rc)
        return rc;
    if (no_split) {
        REAL(MPI_Comm_free)(out);
        return MPI_ERR_OTHER;
    }
    made = *out;
    return rc;
}
int MPI_Comm_free(MPI_Comm *comm)
{
    freed += *comm == made;
    return REAL(MPI_Comm_free)(comm);
}
"""


def preloaded(folder: Path) -> dict[str, str]:
    """Compile the library in a folder; return the variable that lets a job load it."""
    return preload(SOURCE, folder / "failing.c", compiler="mpicc")
