"""Several groups at once: by size, by node, by lists, and splits of a group."""

from __future__ import annotations

import importlib
from datetime import timedelta

import pytest
import torch
from group_cases import OUTSIDE, place, raised, sum_over
from mpi4py import MPI

import hpcdist as dist
from hpcdist import _engine
from hpcdist.groups.world import world
from hpcdist.testing import parallel_assert, parallel_raises

pytestmark = pytest.mark.ranks

MPICH = "MPICH" in _engine.library_version()


def test_subgroups_of_one_size():
    rank, size = place()
    for group_size in (each for each in range(1, size + 1) if size % each == 0):
        own, groups = dist.new_subgroups(group_size)
        first = rank // group_size * group_size
        expected = list(range(first, first + group_size))
        parallel_assert(dist.get_process_group_ranks(own) == expected)
        parallel_assert(len(groups) == size // group_size)
        inside = [group is own for group in groups]
        parallel_assert(inside == [i == rank // group_size for i in range(len(groups))])
        parallel_assert(all(g is own or g is OUTSIDE for g in groups))
        parallel_assert(sum_over(own) == sum(expected))
        for group in groups:
            dist.destroy_process_group(group)
    for wrong in (0, -1, size + 1):
        with parallel_raises(ValueError, match=f"group_size={wrong}"):
            dist.new_subgroups(wrong)


def test_subgroups_by_node():
    node = list(dist.group.WORLD.carrier.node_ranks)
    own, groups = dist.new_subgroups()
    mine = [group for group in groups if group is not dist.GroupMember.NON_GROUP_MEMBER]
    parallel_assert(dist.get_process_group_ranks(own) == node and mine == [own])
    parallel_assert(len(groups) == 1 or len(node) < dist.get_world_size())


@pytest.mark.mpi(min_size=2)
def test_subgroups_of_a_group():
    rank, size = place()
    others = dist.new_group(range(1, size))
    if rank:
        own, groups = dist.new_subgroups(1, group=others)
        ok = dist.get_process_group_ranks(own) == [rank] and len(groups) == size - 1
    else:
        ok = "not in the given group" in raised(lambda: dist.new_subgroups(1, group=others))
    parallel_assert(ok)


def test_subgroups_by_enumeration():
    rank, size = place()
    odd, even = list(range(1, size, 2)), list(range(0, size, 2))
    lists = [even, odd] if odd else [even]
    own, groups = dist.new_subgroups_by_enumeration(lists, group_desc="parity")
    expected = lists[rank % 2]
    parallel_assert(dist.get_process_group_ranks(own) == expected and len(groups) == len(lists))
    parallel_assert(own.group_desc == "parity" and sum_over(own) == sum(expected))
    own, groups = dist.new_subgroups_by_enumeration([[0]])
    parallel_assert((own is None) == (rank != 0) and len(groups) == 1)
    with parallel_raises(ValueError, match="rank 0 is in both"):
        dist.new_subgroups_by_enumeration([[0], [0]])
    with parallel_raises(ValueError, match="at least one"):
        dist.new_subgroups_by_enumeration([])


def test_split_group():
    rank, size = place()
    half = (size + 1) // 2
    lists = [list(range(half)), list(range(half, size))][: 1 + (size > 1)]
    part = dist.split_group(split_ranks=lists)
    expected = lists[rank >= half]
    parallel_assert(dist.get_process_group_ranks(part) == expected)
    parallel_assert(sum_over(part) == sum(expected) and part.group_desc == "default_pg:split")
    # ranks are those of the parent, and ranks left out get None
    inner = dist.split_group(part, [[part.size() - 1]], group_desc="last")
    last = rank == expected[-1]
    parallel_assert((inner is not None) == last)
    parallel_assert(not last or dist.get_process_group_ranks(inner) == [rank])
    parallel_assert(dist.split_group(split_ranks=[[0]], backend="cpu:mpi") is None or rank == 0)
    for lists, hint in (
        (None, "at least one"),
        ([], "at least one"),
        ([[]], "empty"),
        ([[0], [0]], "both"),
        ([[0, 0]], "twice"),
        ([[size]], f"outside the group 'world' of size {size}"),
    ):
        with parallel_raises(ValueError, match=hint):
            dist.split_group(split_ranks=lists)
    with parallel_raises(ValueError, match="the parent group 'world' has 'cpu:mpi'"):
        dist.split_group(split_ranks=[[0]], backend="cpu:nccl")


def place_of_the_next():
    """MPI's number of the next communicator: with Open MPI the first one that is free."""
    comm = MPI.COMM_SELF.Dup()
    found = comm.py2f()
    comm.Free()
    return found


@pytest.mark.once
def test_groups_that_all_members_have_dropped_are_freed():
    """MPICH has 2,048 communicators per process. What is still used stays, and so does its name."""
    rank, size = place()
    kept = dist.new_group(backend="mpi")
    named = dist.new_group(backend="mpi").group_name
    works = []
    before = place_of_the_next()
    for _ in range(2200 if MPICH else 200):
        group = dist.new_group(backend="mpi")
        if len(works) < 3:
            value = torch.full((5,), rank + 1.0)
            works.append((value, dist.all_reduce(value, group=group, async_op=True)))
    del group
    for value, work in works:
        work.wait()
        parallel_assert(value.tolist() == [size * (size + 1) / 2] * 5, value)
    parallel_assert(MPICH or place_of_the_next() < before + 50, f"{before} {place_of_the_next()}")
    parallel_assert(sum_over(kept) == sum(range(size)))
    parallel_assert(dist.get_backend_impl(named, "cpu").size == size)
    # one member still has it: it is the same group for that one, and is freed later
    late = dist.new_group(backend="mpi")
    if rank:
        del late
    for _ in range(3):
        dist.destroy_process_group(dist.new_group(backend="mpi"))
    late = None
    for _ in range(3):
        dist.destroy_process_group(dist.new_group(backend="mpi"))


@pytest.mark.skipif(not MPICH, reason="other MPIs have millions of communicators")
@pytest.mark.slow
def test_more_groups_than_mpich_has_communicators():
    """The error says what has run out and how to get it back, and that helps."""
    groups, text = [], ""
    while not text and len(groups) < 5000:
        try:
            groups.append(dist.new_group(backend="mpi"))
        except dist.DistBackendError as error:
            text = str(error)
    parallel_assert(
        "no communicator left; this rank has" in text and "destroy_process_group(group)" in text,
        text,
    )
    for group in groups:
        dist.destroy_process_group(group)
    group = dist.new_group()
    parallel_assert(sum_over(group) == sum(range(dist.get_world_size())))
    dist.destroy_process_group(group)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("where", ["create", "ProcessGroup"])
def test_a_group_that_a_handlers_exception_took_counts_on_all_members(monkeypatch, where):
    """The other members have it, so all must choose the same name for the next one."""

    class Bang(Exception):
        pass

    module = importlib.import_module("hpcdist.groups.new_group")
    after = getattr(module, where)

    def bang(*arguments):
        after(*arguments)
        raise Bang

    rank, size = place()
    found = None
    with monkeypatch.context() as patch:
        if rank == 0:
            patch.setattr(module, where, bang)
        try:
            dist.new_group()
        except Bang as error:
            found = error
    parallel_assert((found is not None) == (rank == 0), repr(found))
    group = dist.new_group(timeout=timedelta(seconds=5))
    parallel_assert(sum_over(group) == sum(range(size)))
    dist.destroy_process_group(group)


def test_a_group_that_is_made_while_the_world_is_replaced_counts_in_the_old_one(monkeypatch):
    """As by a thread, while another one reconfigures; then all ranks would not count alike."""
    make = importlib.import_module("hpcdist.groups.new_group")
    create, old = make.create, world.counts

    def replaced(*arguments):
        made = create(*arguments)
        world.counts = {}
        return made

    monkeypatch.setattr(make, "create", replaced)
    group = dist.new_group()
    new, world.counts = world.counts, old
    dist.destroy_process_group(group)
    parallel_assert(not new, f"{new}")
