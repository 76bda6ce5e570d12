"""torch's context for several operations."""

from __future__ import annotations

import pytest
import torch

import hpcdist as dist
from hpcdist.testing import parallel_assert, parallel_raises

pytestmark = pytest.mark.ranks


def test_operations_under_the_context_are_waited_for():
    size = dist.get_world_size()
    group = dist.new_group()
    comm = group.carrier
    a, b = torch.ones(3), torch.ones(1 << 18)
    with dist._coalescing_manager(group, async_ops=True) as manager:
        dist.all_reduce(a, group=group)
        dist.all_reduce(b, group=group, async_op=True)
    parallel_assert(len(manager.works) == 1)
    manager.append(None)
    manager.wait()
    parallel_assert(a[0] == size and b[-1] == size and group.carrier is comm)
    with dist._coalescing_manager(group):
        dist.all_reduce(b, group=group, async_op=True)
    parallel_assert(bool((b == size * size).all()))
    with dist._coalescing_manager(group):
        dist.destroy_process_group(group)
    parallel_assert(dist.is_initialized())


@pytest.mark.mpi(min_size=2)
def test_messages_under_the_context():
    rank, size = dist.get_rank(), dist.get_world_size()
    got = torch.zeros(1 << 16)
    with dist._coalescing_manager(async_ops=True) as manager:
        dist.irecv(got, (rank - 1) % size)
        dist.isend(torch.full((1 << 16,), float(rank)), (rank + 1) % size)
    manager.wait()
    parallel_assert(bool((got == (rank - 1) % size).all()))


def test_an_exception_ends_the_context():
    comm = dist.group.WORLD.carrier
    with parallel_raises(KeyError), dist._coalescing_manager():
        raise KeyError
    parallel_assert(dist.group.WORLD.carrier is comm and dist.group.world.comm is comm)
