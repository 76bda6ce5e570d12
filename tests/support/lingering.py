"""A library to preload that holds a rank back in a call of MPI which makes a communicator.

It stands for a rank that is still inside: Open MPI crashes there if another rank revokes what that
one has got already. A program sets ``linger`` or ``dies`` in the library, on the ranks concerned.
HPCDIST_TEST_CALL has the call's name, HPCDIST_TEST_NUMBER which one it is of those since the
session was shrunk. A rank says when it leaves that call late, and when it revokes what it made.
"""

from __future__ import annotations

import re
from pathlib import Path

from preloading import preload

SOURCE = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <mpi.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
int linger, dies;
static int calls = -100; /* since MPIX_Comm_shrink */
static MPI_Comm made;

static void say(const char *what, const char *call)
{
    struct timespec t;
    char line[128];
    double now;
    int n;
    clock_gettime(CLOCK_MONOTONIC, &t);
    now = t.tv_sec + 1e-9 * t.tv_nsec;
    n = snprintf(line, sizeof line, "%s %s %.6f\\n", what, call, now);
    if (write(1, line, n) != n)
        abort();
}

static int leave(const char *call, int rc, MPI_Comm *out)
{
    const struct timespec second = {1, 0};
    if (rc || made || strcmp(call, getenv("HPCDIST_TEST_CALL")) ||
        ++calls != atoi(getenv("HPCDIST_TEST_NUMBER")))
        return rc;
    __atomic_store_n(&made, *out, __ATOMIC_RELEASE);
    if (dies) {
        say("dies", call);
        kill(getpid(), SIGKILL);
    }
    if (linger) {
        nanosleep(&second, NULL);
        say("leaves", call);
    }
    return rc;
}

/* hpcdist's loader has put it in no global scope. */
static void *real(const char *name)
{
    return dlsym(dlopen("libmpi.so.40", RTLD_NOW | RTLD_NOLOAD), name);
}
#define REAL(name) ((__typeof__(&name))real("P" #name))
int MPIX_Comm_shrink(MPI_Comm, MPI_Comm *);
int MPIX_Comm_revoke(MPI_Comm);
int MPIX_Comm_shrink(MPI_Comm from, MPI_Comm *out)
{
    calls = 0;
    return leave("shrink", REAL(MPIX_Comm_shrink)(from, out), out);
}
int MPI_Comm_dup(MPI_Comm from, MPI_Comm *out)
{
    return leave("dup", REAL(MPI_Comm_dup)(from, out), out);
}
int MPI_Comm_split(MPI_Comm from, int color, int key, MPI_Comm *out)
{
    return leave("split", REAL(MPI_Comm_split)(from, color, key, out), out);
}
int MPI_Comm_split_type(MPI_Comm from, int type, int key, MPI_Info info, MPI_Comm *out)
{
    return leave("split_type", REAL(MPI_Comm_split_type)(from, type, key, info, out), out);
}
int MPIX_Comm_revoke(MPI_Comm comm)
{
    if (__atomic_load_n(&made, __ATOMIC_ACQUIRE) == comm)
        say("revokes", getenv("HPCDIST_TEST_CALL"));
    return REAL(MPIX_Comm_revoke)(comm);
}
"""


def preloaded(folder: Path, call: str, number: int) -> dict[str, str]:
    """Compile the library in a folder; return the variables that let a job load it for a call."""
    chosen = {"HPCDIST_TEST_CALL": call, "HPCDIST_TEST_NUMBER": str(number)}
    return chosen | preload(SOURCE, folder / "lingering.c", compiler="mpicc")


def times(text: str, what: str) -> list[float]:
    """Return the moments, in seconds, at which ranks said what they do."""
    return [float(when) for when in re.findall(rf"{what} \w+ ([0-9.]+)", text)]
