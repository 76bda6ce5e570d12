"""Groups over NCCL that are made from others: by splitting, by leaving ranks out; and at once."""

from __future__ import annotations

from datetime import timedelta

import pytest
import standin
import torch
from mpi4py import MPI
from standin import cpu, gpu

import hpcdist as dist
from hpcdist.backends.dispatch import serving
from hpcdist.backends.nccl.communicators import Communicators
from hpcdist.groups.shrink import SHRINK_ABORT
from hpcdist.testing import parallel_assert, parallel_raises

BACKENDS = ["cpu:mpi,cuda:nccl", "nccl"]

pytestmark = [pytest.mark.standin, pytest.mark.usefixtures("runtime")]


def start(backend: str, **arguments) -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group(backend, timeout=timedelta(seconds=20), **arguments)


def communicator(group=None):
    """The communicator of a group, if it has one already."""
    pg = dist.group.WORLD if group is None else group
    return serving(pg.carrier, gpu(torch.ones(1))).communicators.usable(0)


def add_up(group) -> float:
    data = gpu(torch.tensor([dist.get_rank() + 1.0]))
    dist.all_reduce(data, group=group)
    return cpu(data).item()


def wanted(ranks) -> float:
    return sum(rank + 1.0 for rank in ranks)


@pytest.mark.parametrize("backend", BACKENDS)
def test_groups_that_divide_another_are_split_from_it(backend, monkeypatch):
    size, rank = dist.get_world_size(), dist.get_rank()
    start(backend)
    # before the world has a communicator there is nothing to split
    first = dist.new_group(list(range(size)))
    parallel_assert(communicator() is None and communicator(first) is None)
    dist.all_reduce(gpu(torch.ones(1)))
    parity = [list(range(start, size, 2)) for start in range(min(2, size))]
    own = parity[rank % 2]
    halves, _ = dist.new_subgroups_by_enumeration(parity)
    split = dist.split_group(split_ranks=parity)
    mesh = dist.init_device_mesh("cuda", (size, 1), mesh_dim_names=("all", "one"))
    alone = mesh.get_group("one")
    parallel_assert(all(communicator(group) is not None for group in (halves, split, alone)))
    parallel_assert(communicator(halves).size == len(own) and communicator(alone).size == 1)
    for group in (halves, split):
        parallel_assert(add_up(group) == wanted(own))
    parallel_assert(add_up(alone) == rank + 1 and add_up(first) == wanted(range(size)))
    # the parts live on without the whole, whose operations others wait for
    again = dist.split_group(halves, [list(range(len(own)))])
    parallel_assert(communicator(again) is not None)
    dist.destroy_process_group(halves)
    parallel_assert(add_up(again) == wanted(own))
    # by some ranks only there is no operation of all
    if size > 2:
        pair = dist.new_group([0, 1])
        if rank < 2:
            assert communicator(pair) is None and add_up(pair) == 3.0
    monkeypatch.setenv("HPCDIST_NCCL_SPLIT", "0")
    other = dist.new_group(list(range(size)))
    parallel_assert(communicator(other) is None and add_up(other) == wanted(range(size)))


def test_a_rank_without_a_communicator_keeps_all_from_splitting():
    start("cpu:mpi,cuda:nccl")
    add_up(None)
    dist.barrier()
    if dist.get_rank() == 0:
        communicator().abort()
    group = dist.new_group(list(range(dist.get_world_size())))
    parallel_assert(communicator(group) is None)
    parallel_assert(add_up(group) == wanted(range(dist.get_world_size())))


@pytest.mark.parametrize("backend", BACKENDS)
def test_with_a_device_the_communicator_is_made_at_once(backend, monkeypatch):
    size = dist.get_world_size()
    met = []
    join = Communicators._join

    def noted(self, index, unique, *rest):
        met.append(len(unique))
        return join(self, index, unique, *rest)

    monkeypatch.setattr(Communicators, "_join", noted)
    monkeypatch.setenv("HPCDIST_NCCL_RANKS_PER_ROOT", "2")
    start(backend, device_id=torch.device("cuda", 0))
    parallel_assert(communicator() is not None and met == [(size + 1) // 2])
    group = dist.new_group([0], device_id="cuda:0")
    if dist.get_rank() == 0:
        assert communicator(group) is not None and add_up(group) == 1.0
    parallel_assert(add_up(None) == wanted(range(size)))


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_left_of_a_group(backend):
    size, rank = dist.get_world_size(), dist.get_rank()
    last = size - 1
    start(backend)
    if rank != last:
        # nothing to shrink yet: the group makes its own communicator
        early = dist.shrink_group([last])
        assert communicator(early) is None and add_up(early) == wanted(range(last))
    dist.all_reduce(gpu(torch.ones(1)))
    if rank != last:
        left = dist.shrink_group([last])
        assert left.size() == last and left.rank() == rank
        assert communicator(left) is not None and add_up(left) == wanted(range(last))
    elif size > 2:
        with pytest.raises(RuntimeError, match="one of those that are left out"):
            dist.shrink_group([last])
    parallel_assert(add_up(None) == wanted(range(size)), "the old group stays")
    # rank `last` hangs; the others do not wait for the timeout
    with standin.fault(f"hang:{last}:3"):
        dist.all_reduce(gpu(torch.ones(1)), async_op=True)
        if rank != last:
            left = dist.shrink_group([last], shrink_flags=SHRINK_ABORT)
            MPI.COMM_WORLD.Barrier()
            assert communicator(left) is not None and add_up(left) == wanted(range(last))
            with pytest.raises(dist.DistBackendError, match="aborted"):
                dist.all_reduce(gpu(torch.ones(1)))
        else:
            MPI.COMM_WORLD.Barrier()  # an abort that the others see is a failure, not this
            communicator().abort()
    try:
        dist.destroy_process_group()
    except dist.DistError:
        pass  # what hung was aborted, and nobody waited for it


@pytest.mark.mpi(min_size=2)
def test_what_is_left_of_a_group_over_mpi():
    start("mpi")
    size, rank = dist.get_world_size(), dist.get_rank()
    if rank:
        left = dist.shrink_group([0])
        data = torch.tensor([float(rank)])
        dist.all_reduce(data, group=left)
        assert data.item() == sum(range(1, size)) and left.rank() == rank - 1
    with parallel_raises(ValueError, match="cannot be empty"):
        dist.shrink_group([])
    with parallel_raises(ValueError, match="names all"):
        dist.shrink_group(range(size))
    with parallel_raises(ValueError, match="Invalid shrink_flags"):
        dist.shrink_group([0], shrink_flags=7)
    with parallel_raises(ValueError, match="outside"):
        dist.shrink_group([size])
