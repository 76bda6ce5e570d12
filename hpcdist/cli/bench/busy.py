"""Processes that keep cores busy, so that a bench shows what a shared machine does to it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

#: On any core of the machine, until the process that started it has gone.
_LOOP = """
import os, sys
try:
    os.sched_setaffinity(0, range(os.cpu_count()))
except OSError:
    pass  # a container may allow fewer
parent = int(sys.argv[1])
while os.getppid() == parent:
    for _ in range(1_000_000):
        pass
"""


@contextlib.contextmanager
def busy(count: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Run processes that keep a core of this node busy each.

    Parameters
    ----------
    count : int
        How many.

    Yields
    ------
    list of subprocess.Popen
        They are killed at the end.
    """
    command = [sys.executable, "-S", "-c", _LOOP, str(os.getpid())]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(count):
            processes.append(subprocess.Popen(command))
        yield processes
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()
