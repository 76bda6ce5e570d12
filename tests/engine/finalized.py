"""The program of test_finalized.py: it finalizes MPI itself, and destroys its groups afterwards.

    mpirun -n 2 python finalized.py WHAT

WHAT: what is in flight, or has been left, when MPI ends. mpi4py is imported first, and starts MPI,
unless that ends with "imported later".
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from datetime import timedelta

import numpy as np
from ending_parts import say

import hpcdist as dist


def finalize() -> None:
    importlib.import_module("mpi4py.MPI").Finalize()


def refused(call: Callable[[], object]) -> None:
    """Make a call that comes after the end of MPI."""
    try:
        call()
    except dist.DistError as error:
        assert "the program has finalized MPI" in str(error), error
    else:
        raise AssertionError("not refused")


def destroy(rank: int, how: str) -> None:
    groups = [dist.new_group() for _ in range(4)]
    for group in groups:
        dist.all_reduce(np.ones(1 << 16, np.float32), group=group)
    works, other = [], 1 - rank
    if how == "dropped":
        del group
        groups.pop()
    elif how == "destroyed":
        if rank == 0:  # the other one does not come: MPI's part is left for later
            dist.destroy_process_group(groups.pop())
    elif how == "queued":
        dist.barrier()
        works = [dist.all_reduce(np.ones(9, np.float32), async_op=True) for _ in range(20)]
    elif how.startswith("several lanes"):
        values = np.ones(1 << 18, np.float32)
        works = [dist.all_reduce(values, group=groups[i % 2], async_op=True) for i in range(40)]
    elif how == "without the others" and rank == 1:
        works = [dist.all_reduce(np.ones(9, np.float32), async_op=True) for _ in range(3)]
    elif how == "messages":
        works = [dist.irecv(np.ones(9, np.float32), other, group=groups[0])]
    elif how == "long messages":  # of which MPI sends the most when their receive is there
        values = np.ones(1 << 20, np.float32)
        works = [dist.isend(values, other), dist.irecv(np.zeros_like(values), other)]
    if how not in ("queued", "without the others") and "lanes" not in how:
        dist.barrier()
    finalize()
    if how == "nothing":
        refused(lambda: dist.all_reduce(np.ones(3)))
        refused(lambda: dist.all_reduce(np.ones(3), async_op=True))
        refused(dist.barrier)
        refused(lambda: dist.isend(np.ones(3), other))
        refused(lambda: dist.recv(np.ones(3), other))
        refused(dist.new_group)
    if how == "one by one":
        dist.destroy_process_group(groups[0])
    dist.destroy_process_group()
    ends = []
    for work in works:
        try:
            work.wait()
            ends.append("well")
        except dist.DistError as error:
            ends.append(str(error))
    fail = how in ("messages", "without the others")
    wanted = "the program finalized MPI" if fail else "well"
    assert all(wanted in end for end in ends), ends
    assert not dist.is_initialized()
    say(f"rank {rank} ends")


if __name__ == "__main__":
    if not sys.argv[1].endswith("imported later"):
        importlib.import_module("mpi4py.MPI")
    dist.init_process_group(timeout=timedelta(seconds=20))
    destroy(dist.get_rank(), sys.argv[1])
