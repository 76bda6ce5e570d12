"""Processes that keep cores busy, so that a bench shows what a shared machine does to it."""

from __future__ import annotations

import os
import subprocess
import sys
from types import TracebackType

__all__ = ["Busy"]

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


class Busy:
    """Busy processes on this node, as a context.

    Parameters
    ----------
    count : int
        How many; each keeps one core busy.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self.processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Busy:
        command = [sys.executable, "-S", "-c", _LOOP, str(os.getpid())]
        self.processes = [subprocess.Popen(command) for _ in range(self._count)]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()
