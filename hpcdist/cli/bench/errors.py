"""What a bench cannot go on with."""

from __future__ import annotations

import sys

from hpcdist import group

__all__ = ["BenchError", "Unsupported"]


class BenchError(Exception):
    """A fault that every rank finds alike, such as arguments that contradict each other.

    It must be raised on all ranks. The command prints it once and ends with status 2.
    """

    def report(self) -> None:
        """Print it on rank 0. All ranks must call it."""
        rank = group.get_rank() if group.is_initialized() else 0
        if rank == 0:
            print(f"hpcdist bench: error: {self}", file=sys.stderr, flush=True)
        if group.is_initialized():
            # who leaves with a status ends the job: not before the text is out
            group.world.comm.barrier()


class Unsupported(Exception):
    """A library does not offer an operation, or not with these arguments; the text says why."""
