"""Barriers with a timeout of their own, and the one that names who is missing."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

import numpy as np
import pytest
import torch
from cases import Check
from lateness import hear, tell
from patience import at_most, hasty_group

import hpcdist as dist
from hpcdist import MPIOptions
from hpcdist.testing import parallel_assert, parallel_raises

pytestmark = pytest.mark.ranks


def test_barrier():
    parallel_assert(dist.barrier() is None)
    parallel_assert(dist.barrier(device_ids=[0]) is None)
    handle = dist.barrier(async_op=True)
    handle.wait()
    parallel_assert(handle.is_completed())
    before = dist.group.WORLD.timeout
    dist.barrier(timeout=timedelta(seconds=11))
    parallel_assert(dist.group.WORLD.timeout == before)
    with parallel_raises(TypeError, match="device_ids"):
        dist.barrier(device_ids=0)
    with parallel_raises(TypeError, match="timeout"):
        dist.barrier(timeout=3)


@pytest.mark.mpi(min_size=2)
def test_barrier_takes_its_own_timeout():
    """Rank 0 stays away: the others give up at their timeout, and the group stays usable."""
    group = dist.new_group()
    text = ""
    if dist.get_rank():
        try:
            dist.barrier(group, timeout=timedelta(seconds=0.5))
        except dist.DistTimeoutError as error:
            text = str(error)
    dist.barrier()
    parallel_assert(dist.get_rank() == 0 or "0.5" in text, text)
    dist.destroy_process_group(group)


def test_monitored_barrier():
    for _ in range(3):
        dist.monitored_barrier(timeout=timedelta(seconds=15))
    dist.monitored_barrier()
    dist.monitored_barrier(timeout=15.0, wait_all_ranks=True)
    with parallel_raises(ValueError, match="timeout must be zero or more"):
        dist.monitored_barrier(timeout=timedelta(seconds=-1))
    dist.barrier()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("check", ["off", "on"])
@pytest.mark.parametrize("wait_all_ranks", [False, True])
def test_monitored_barrier_names_who_is_missing(wait_all_ranks, check):
    """The last rank stays away; all others say so, on every rank, and the next one works."""
    rank, size = (dist.get_rank(), dist.get_world_size())
    group = dist.new_group(pg_options=MPIOptions(check=check))
    gone = size - 1
    text = ""
    if rank != gone:
        try:
            dist.monitored_barrier(group, timedelta(seconds=0.4), wait_all_ranks)
        except dist.DistTimeoutError as error:
            text = str(error)
    dist.barrier()
    parallel_assert(rank == gone or f"rank {gone}" in text, text)
    # the rank that was away enters late, alone: its message must not be taken for another round's
    if rank == gone:
        try:
            dist.monitored_barrier(group, timedelta(seconds=0.3))
        except dist.DistTimeoutError as error:
            text = str(error)
    dist.barrier()
    parallel_assert(rank != gone or "too late" in text or "gave up" in text, text)
    dist.monitored_barrier(group, timedelta(seconds=15))
    parallel_assert(group.timeout == dist.group.WORLD.timeout)
    dist.destroy_process_group(group)


@pytest.mark.mpi(min_size=2)
def test_monitored_barrier_without_rank_0():
    rank, _ = (dist.get_rank(), dist.get_world_size())
    group = dist.new_group()
    text = ""
    if rank:
        try:
            dist.monitored_barrier(group, timedelta(seconds=0.3))
        except dist.DistTimeoutError as error:
            text = str(error)
    dist.barrier()
    parallel_assert(rank == 0 or "rank 0" in text, text)
    dist.destroy_process_group(group)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("kind", ["monitored", "barrier"])
def test_a_short_timeout_is_the_barriers_alone(kind):
    """What is in flight keeps its own: here an all_reduce that the last rank joins late."""
    rank, size = (dist.get_rank(), dist.get_world_size())
    group = dist.new_group(pg_options=MPIOptions(check="off"))
    other = dist.new_group()
    t, text = torch.ones(3), ""
    if rank == size - 1:
        hear(*range(size))
        dist.all_reduce(t, group=group, async_op=True).wait()
    else:
        work = dist.all_reduce(t, group=group, async_op=True)
        try:
            if kind == "monitored":
                dist.monitored_barrier(group, timedelta(seconds=0.3))
            else:
                group.carrier.timeout = 0.3  # as hpcdist.barrier(timeout=) does for its own time
                dist.barrier(other, timeout=timedelta(seconds=0.9))
        except dist.DistTimeoutError as error:
            text = str(error)
        group.carrier.timeout = 20.0
        tell(size - 1)
        work.wait()
    parallel_assert(t.eq(size).all())
    parallel_assert(rank == size - 1 or "0.3" in text or "0.9" in text, text)
    for each in (group, other):
        dist.destroy_process_group(each)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("transport", ["shared memory", "MPI"])
def test_all_ranks_end_a_monitored_barrier_alike(transport, monkeypatch):
    """Late by about the timeout: all succeed or none does. A wrong call is told to the others."""
    monkeypatch.setenv("HPCDIST_CHECK_TRANSPORT", "mpi" if transport == "MPI" else "")
    rank, size = dist.get_rank(), dist.get_world_size()
    group, check, calm = dist.new_group(), Check(), dist.new_group()
    ends = np.zeros(size, np.int64)
    for late in (0.0, 0.018, 0.02, 0.022, 0.06):
        dist.barrier(calm)
        time.sleep(late if rank == size - 1 else 0)
        own = np.ones(1, np.int64)
        try:
            dist.monitored_barrier(group, 0.02)
        except dist.DistTimeoutError as error:
            own[0] = 0
            missing = f"{size - 1}" in str(error)
            check.that(missing, str(error))
        dist.all_gather_into_tensor(ends, own, group=calm)
        check.that(len(set(ends.tolist())) == 1, f"late {late}: {ends}")
    wrong: list[Callable[[], object]] = [
        lambda: dist.monitored_barrier(group, -1),
        lambda: dist.monitored_barrier(group, "soon"),
        lambda: dist.barrier(group),
        lambda: dist.all_reduce(np.ones(2), group=group),
    ]
    for odd, call in enumerate(wrong):
        began, raised = time.monotonic(), ""
        try:
            (call if rank == odd % size else lambda: dist.monitored_barrier(group, 20))()
        except Exception as error:
            raised = type(error).__name__
        known = ("ValueError", "TypeError", "DistMismatchError")
        check.that(raised in known, f"call {odd} ended with {raised}")
        check.that(
            time.monotonic() - began < at_most(3), f"call {odd} took {time.monotonic() - began} s"
        )
    total = np.ones(1)
    dist.all_reduce(total, group=group)
    check.that(total[0] == size, f"then {total}")
    check.done()
    for each in (group, calm):
        dist.destroy_process_group(each)


@pytest.mark.mpi(min_size=2)
def test_it_may_take_longer_than_the_groups_timeout():
    group = hasty_group(0.2)
    if dist.get_rank() == dist.get_world_size() - 1:
        time.sleep(0.8)
    dist.monitored_barrier(group, timedelta(seconds=15))
    parallel_assert(group.timeout == timedelta(seconds=0.2))
    dist.destroy_process_group(group)


def test_wrong_arguments_of_breakpoint():
    with parallel_raises(ValueError, match="rank=7"):
        dist.breakpoint(7)
    with parallel_raises(ValueError, match="timeout_s"):
        dist.breakpoint(timeout_s=0)
