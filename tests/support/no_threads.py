"""A library to preload that refuses the engine a thread, as a limit of processes does.

Such a limit does not bind root. A program sets ``refuse`` in the library while it is to hold.
"""

from __future__ import annotations

from pathlib import Path

from preloading import preload

SOURCE = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <string.h>
int refuse;
int pthread_create(pthread_t *t, const pthread_attr_t *a, void *(*f)(void *), void *arg)
{
    int (*real)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);
    Dl_info by;
    if (refuse && dladdr(__builtin_return_address(0), &by) && strstr(by.dli_fname, "_engine"))
        return EAGAIN;
    real = dlsym(RTLD_NEXT, "pthread_create");
    return real(t, a, f, arg);
}
"""


def preloaded(folder: Path) -> dict[str, str]:
    """Compile the library in a folder; return the variable that lets a job load it."""
    return preload(SOURCE, folder / "refuse.c")
