"""Entry check "full": what its second half, the comparison of results, says and waits for."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest
import torch

import hpcdist as dist
from hpcdist.testing import parallel_assert

pytestmark = [pytest.mark.ranks, pytest.mark.mpi(min_size=2)]

TIMEOUT = 2.0


def test_ranks_that_meet_shortly_before_the_deadline() -> None:
    """The results are compared when it has passed."""
    group = dist.new_group(timeout=timedelta(seconds=TIMEOUT), pg_options=options())
    size, last = dist.get_world_size(), dist.get_rank() == dist.get_world_size() - 1
    tensor = torch.ones(32 << 20)
    dist.all_reduce(tensor, group=group)
    for before in (0.03, 0.06, 0.1, 0.2, 0.4, 0.8, 1.6):
        tensor.fill_(1)
        dist.barrier()
        if last:
            time.sleep(TIMEOUT - before)
        error = ""
        try:
            dist.all_reduce(tensor, group=group)
        except dist.DistTimeoutError as late:
            error = str(late)
        wanted = 1.0 if error else float(size)
        said = f"{tensor[0]} and {tensor[-1]} where {wanted} is due, {error}"
        parallel_assert(tensor[0] == tensor[-1] == wanted, said)
        if not error:
            return
    parallel_assert(False, f"it came too late {before} s before the deadline: {error}")


def test_results_that_differ_have_moved() -> None:
    """A thread of the last rank writes to the tensor meanwhile."""
    group = dist.new_group(pg_options=options())
    tensor, over = torch.ones(1 << 18), threading.Event()

    def write() -> None:
        while not over.is_set():
            tensor[1 << 17 :].uniform_()  # without the interpreter's lock

    if dist.get_rank() == dist.get_world_size() - 1:
        threading.Thread(target=write, daemon=True).start()
    said = ""
    for _ in range(200):
        try:
            dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group)
        except dist.DistMismatchError as error:
            said = str(error)
            break
    over.set()
    parallel_assert("with checksum" in said, said)
    moved = "The data has moved, and the tensors hold the result; the group can still be used."
    parallel_assert(moved in said and "Nothing was transferred" not in said, said)
    tensor = torch.ones(3)
    dist.all_reduce(tensor, group=group)
    parallel_assert(tensor.eq(dist.get_world_size()).all())


def options() -> dist.MPIOptions:
    return dist.MPIOptions(check="full")
