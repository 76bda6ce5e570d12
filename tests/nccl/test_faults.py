"""What goes wrong in flight is a typed error on every rank, in time, and the group is left usable.

Here each fault that leaves the processes alive; ``tests/launch/test_nccl.py`` kills them.
"""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import standin
from standin import cpu, gpu

import hpcdist as dist
from hpcdist.testing import parallel_assert

import torch  # isort: skip

LIMIT = 0.5
#: Allowed beyond the group's timeout, for a machine that is busy.
SLACK = 5.0

pytestmark = pytest.mark.mpi(min_size=2)


@pytest.fixture
def group(runtime):
    """A fresh group over both, after which the default one comes back."""
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("cpu:mpi,cuda:nccl", timeout=timedelta(seconds=20))
    nccl = dist.new_group(list(range(dist.get_world_size())), timeout=timedelta(seconds=LIMIT))
    data = gpu(torch.ones(4))
    dist.all_reduce(data, group=nccl)  # makes the communicator
    cpu(data)
    dist.barrier()
    yield nccl
    dist.destroy_process_group()


def outcome(work: object, group: object, mode: str) -> Exception | None:
    """What this rank is told of an operation."""
    try:
        if work is not None:
            work.wait(10.0)
        else:
            # a synchronous one waits on its stream; the next operation tells
            standin.Stream(0).synchronize()
            dist.all_reduce(gpu(torch.ones(1)), group=group)
    except Exception as error:
        return error
    return None


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("kind", ["hang", "remote", "absent", "mismatch"])
def test_a_fault(group, kind, mode):
    rank, size = dist.get_rank(), dist.get_world_size()
    victim = size - 1
    data = gpu(torch.ones(4))
    began = time.monotonic()
    error = None
    with standin.fault(f"{kind}:{victim}:2"):
        if kind != "absent" or rank != victim:
            mine = data[:3] if kind == "mismatch" and rank == victim else data
            work = dist.all_reduce(mine, group=group, async_op=mode == "async")
            error = outcome(work, group, mode)
    took = time.monotonic() - began
    fine = isinstance(error, dist.DistError) or (kind == "absent" and rank == victim)
    parallel_assert(fine, lambda: f"{error!r}")
    parallel_assert(took < LIMIT + SLACK, lambda: f"took {took:.2f} s")
    if kind in ("hang", "absent") and error is not None:
        # one rank's watchdog is the first, and its abort is what others may hear of
        late = isinstance(error, (dist.DistTimeoutError, dist.RankFailedError))
        parallel_assert(late, lambda: repr(error))
        assert "all_reduce" in str(error) and f"rank {rank}" in str(error), error
    else:
        parallel_assert(True)
    # the host's side goes on, and so does a new group
    dist.barrier()
    again = dist.new_group(list(range(size)), timeout=timedelta(seconds=20))
    dist.all_reduce(data.zero_().add_(1), group=again)
    parallel_assert(bool((cpu(data) == size).all()))


def test_a_delay_is_no_fault(group):
    data = gpu(torch.ones(4))
    with standin.fault("delay:0:2:0.2"):
        work = dist.all_reduce(data, group=group, async_op=True)
        work.wait()
        parallel_assert(bool((cpu(data) == dist.get_world_size()).all()))
    parallel_assert(work.is_success())


def test_a_failed_call_is_raised_at_once(group):
    rank = dist.get_rank()
    error = None
    with standin.fault("fail:0:2"):
        try:
            work = dist.all_reduce(gpu(torch.ones(4)), group=group, async_op=True)
            work.wait(10.0)
        except dist.DistError as problem:
            error = problem
    parallel_assert(error is not None)
    if rank == 0:
        assert "ncclAllReduce" in str(error) and "internal error" in str(error), error
    parallel_assert(True)
