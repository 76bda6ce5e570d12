"""Barriers with a timeout of their own, and the one that names who is missing."""

from __future__ import annotations

from datetime import timedelta

import pytest

import hpcdist as dist
from hpcdist import MPIOptions
from hpcdist.testing import parallel_assert, parallel_raises


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
    with parallel_raises(ValueError, match="positive"):
        dist.monitored_barrier(timeout=timedelta(0))
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
    parallel_assert(rank == gone or f"rank(s) [{gone}]" in text, text)
    # the rank that was away enters late, alone: its message must not be taken for another round's
    if rank == gone:
        try:
            dist.monitored_barrier(group, timedelta(seconds=0.3))
        except dist.DistTimeoutError as error:
            text = str(error)
    dist.barrier()
    parallel_assert(rank != gone or "rank 0" in text, text)
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
