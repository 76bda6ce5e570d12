"""The cores that a rank and its node may keep busy: affinity, and what control groups grant."""

from __future__ import annotations

import os

import pytest
from mpi4py import MPI
from worlds import true_place, works

import hpcdist as dist
from hpcdist import hardware
from hpcdist.groups.resolve import default_group
from hpcdist.testing import parallel_assert

pytestmark = pytest.mark.ranks


def counted(monkeypatch, quota):
    """Start with a quota; how many cores this rank may keep busy, and those of the node."""
    monkeypatch.setattr(hardware, "cpu_quota", lambda: quota)
    dist.init_process_group()
    parallel_assert(works)
    return default_group().carrier.cpus


def test_a_quota_is_shared_by_the_ranks_of_its_group(no_world, monkeypatch):
    rank, size = true_place()
    everyone = MPI.COMM_WORLD.allgather(sorted(os.sched_getaffinity(0)))
    own, together = len(everyone[rank]), len(set().union(*map(set, everyone)))

    def limited(cores, quota):
        return max(1, min(cores, int(quota)))

    for quota in (0.5, 1.0, 1.7, 1e9):
        found = counted(monkeypatch, (quota, 7))
        parallel_assert(found == (limited(own, quota), limited(together, quota)), f"{found}")
        dist.destroy_process_group()
        found = counted(monkeypatch, (quota, rank))  # a group for each rank
        expected = limited(own, quota), limited(together, quota * size)
        parallel_assert(found == expected, f"{found} {expected}")
        dist.destroy_process_group()
    # the last rank has no limit: its node has none either
    found = counted(monkeypatch, (1.0, 7) if rank < size - 1 else None)
    parallel_assert(found == (1 if rank < size - 1 else own, together), f"{found}")
