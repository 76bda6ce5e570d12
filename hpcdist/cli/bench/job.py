"""The processes of one bench: how they start, agree, and what rank 0 says."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shlex
import socket
import sys
import time
from datetime import datetime, timezone
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from hpcdist import _engine, config, hardware, launchers
from hpcdist._ops import ReduceOp
from hpcdist.collectives.objects import all_gather_object
from hpcdist.groups.new_group import new_group
from hpcdist.groups.state import get_rank, get_world_size, world
from hpcdist.startup.destroy import destroy_process_group
from hpcdist.startup.init import init_process_group

from .errors import BenchError


class MpiJob:
    """All ranks of a bench, as a context.

    Entering starts hpcdist and makes a group apart, so that a barrier between two measurements
    disturbs neither the lane nor the settings of the group that is measured. All ranks must call
    every method but `say` and `progress`.

    Parameters
    ----------
    quiet : bool
        Whether `progress` says nothing.

    Attributes
    ----------
    rank, size : int
        This process, and how many there are.
    """

    def __init__(self, quiet: bool = False) -> None:
        self._quiet = quiet
        self._began = self._told = time.monotonic()

    def __enter__(self) -> MpiJob:
        init_process_group()
        self.rank, self.size = get_rank(), get_world_size()
        self._control = new_group(group_desc="bench")
        self._carrier = self._control.carrier
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            destroy_process_group()

    @property
    def first(self) -> bool:
        """bool: whether this is the rank that prints."""
        return self.rank == 0

    def barrier(self) -> None:
        """Wait for all ranks."""
        self._carrier.barrier()

    def worst(self, values: Any) -> np.ndarray:
        """The largest of all ranks' values, place by place, as float64."""
        array = np.array(values, np.float64)
        self._carrier.all_reduce(array, ReduceOp.MAX)
        return array

    def total(self, value: int) -> int:
        """The sum of all ranks' values, on all ranks."""
        array = np.array([value], np.int64)
        self._carrier.all_reduce(array, ReduceOp.SUM)
        return int(array[0])

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, on all ranks."""
        found: list[Any] = [None] * self.size
        all_gather_object(found, value, self._control)
        return found

    def problem(self, text: str | None) -> str | None:
        """Some rank's problem, the same one on all ranks; None if nothing is wrong anywhere."""
        if not self.total(text is not None):
            return None
        return next(each for each in self.gather(text) if each is not None)

    def require(self, text: str | None) -> None:
        """Raise BenchError on all ranks if something is wrong on any; None says that nothing is."""
        found = self.problem(text)
        if found is not None:
            raise BenchError(found)

    def say(self, text: str) -> None:
        """Print a line to standard error, on rank 0."""
        if self.first:
            print(text, file=sys.stderr, flush=True)

    def progress(self, done: int, total: int, what: str) -> None:
        """Print how many rows are ready, at most every two seconds, on rank 0."""
        now = time.monotonic()
        if self._quiet or now - self._told < 2:
            return
        self._told = now
        left = (now - self._began) / done * (total - done) if done else None
        ready = "" if left is None else f", about {left:.0f} s left if the rest goes like this"
        self.say(f"# {done} of {total} done, now {what}{ready}")

    def facts(self) -> dict[str, str]:
        """The conditions of the numbers, the same on all ranks but for the command."""
        first = min(world.comm.node_ranks)
        ranks = self.gather((socket.gethostname(), first, len(hardware.allowed_cpus())))
        nodes = len({(host, first) for host, first, _ in ranks})
        divided = config.get("nodes")
        said = f" (HPCDIST_NODES={divided})" if divided else ""
        cores = sorted({each[2] for each in ranks})
        library = _engine.library_version().strip().splitlines()[0].rstrip(",")
        family = launchers.mpi_family(_engine.library_version())
        short = " ".join(library.split(",")[0].split())
        versions = [f"{name} {_version(name)}" for name in ("hpcdist", "torch", "numpy", "mpi4py")]
        return {
            "command": "python -m hpcdist " + shlex.join(sys.argv[1:]),
            "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
            "ranks": f"{self.size} on {nodes} node{'s' if nodes > 1 else ''}{said}, "
            f"{' or '.join(map(str, cores))} of {os.cpu_count()} cores each",
            "MPI": short if family.split()[0].lower() in short.lower() else f"{family}, {short}",
            "versions": ", ".join(versions),
            "processor": _processor(),
        }


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    except OSError:
        pass
    return platform.machine()
