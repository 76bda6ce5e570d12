"""Too few descriptors and too little address space, for the length of a call."""

from __future__ import annotations

import os
import resource


class Limits:
    """Lower this process's limits inside a ``with``, where any are asked for."""

    def __init__(self, descriptors: int, memory: int) -> None:
        self.descriptors, self.memory = descriptors, memory

    def __enter__(self) -> None:
        if self.descriptors:
            free = os.dup(0)
            os.close(free)
            _lower(resource.RLIMIT_NOFILE, free + self.descriptors)
        if self.memory:
            with open("/proc/self/statm") as file:
                used = int(file.read().split()[0]) * resource.getpagesize()
            _lower(resource.RLIMIT_AS, used + self.memory)

    def __exit__(self, *exc: object) -> None:
        for which, asked in (
            (resource.RLIMIT_NOFILE, self.descriptors),
            (resource.RLIMIT_AS, self.memory),
        ):
            if asked:
                hard = resource.getrlimit(which)[1]
                resource.setrlimit(which, (hard, hard))


def _lower(which: int, soft: int) -> None:
    hard = resource.getrlimit(which)[1]
    resource.setrlimit(which, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def fill_shm(spare: int) -> None:
    """Leave so many bytes of /dev/shm, which must be this job's own."""
    space = os.statvfs("/dev/shm")
    with open("/dev/shm/chaos.filler", "wb") as filler:
        os.posix_fallocate(filler.fileno(), 0, space.f_bavail * space.f_frsize - spare)
