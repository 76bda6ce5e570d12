"""The program of test_finalized.py: it finalizes MPI itself, and destroys its groups afterwards.

    mpirun -n 2 python finalized.py WHAT

WHAT: what is in flight, or has been left, when MPI ends.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import timedelta

import numpy as np
from ending_parts import say
from mpi4py import MPI

import hpcdist as dist


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
    elif how == "messages":
        works = [dist.irecv(np.ones(9, np.float32), other, group=groups[0])]
    elif how == "long messages":  # of which MPI sends the most when their receive is there
        values = np.ones(1 << 20, np.float32)
        works = [dist.isend(values, other), dist.irecv(np.zeros_like(values), other)]
    if how != "queued":
        dist.barrier()
    MPI.Finalize()
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
    wanted = "the program finalized MPI" if how == "messages" else "well"
    assert all(wanted in end for end in ends), ends
    assert not dist.is_initialized()
    say(f"rank {rank} ends")


if __name__ == "__main__":
    dist.init_process_group(timeout=timedelta(seconds=20))
    destroy(dist.get_rank(), sys.argv[1])
