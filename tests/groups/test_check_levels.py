"""A new group whose members disagree, above all about the level of its entry check, is refused."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
from group_cases import place, raised, sum_over

import hpcdist as dist
from hpcdist import MPIOptions
from hpcdist.testing import parallel_assert, parallel_raises

pytestmark = [pytest.mark.ranks, pytest.mark.mpi(min_size=2)]


@pytest.mark.parametrize(("usual", "odd"), [("on", "off"), ("full", "on")])
def test_members_of_other_check_levels_are_refused(usual, odd):
    rank, size = place()
    options = MPIOptions(check=odd if rank == size - 1 else usual)
    with parallel_raises(dist.DistMismatchError, match="entry check level"):
        dist.new_group(pg_options=options)
    group = dist.new_group(pg_options=MPIOptions(check=odd))
    parallel_assert(sum_over(group) == size * (size - 1) // 2)
    dist.destroy_process_group(group)


@pytest.mark.mpi(min_size=3)
def test_a_member_that_comes_later_than_the_odd_one_hears_of_it_at_once():
    """The others wait for it: it would be alone, and wait for its timeout."""
    rank, size = place()
    options = MPIOptions(check="full" if rank == size - 1 else "on")
    for _ in range(3):
        dist.barrier()
        time.sleep(0.3 * (0 < rank < size - 1))
        began = time.monotonic()
        with parallel_raises(dist.DistMismatchError, match="entry check level"):
            dist.new_group(pg_options=options, timeout=timedelta(seconds=15))
        spent = time.monotonic() - began
        parallel_assert(spent < 8, lambda took=spent: f"took {took:.1f} s")
    group = dist.new_group()
    parallel_assert(sum_over(group) == size * (size - 1) // 2)
    dist.destroy_process_group(group)


@pytest.mark.mpi(min_size=3)
def test_a_refusal_concerns_no_later_group_of_the_same_members():
    """Rank 0 calls for all; those that never call for that group hear nothing of it."""
    rank, size = place()
    ranks = list(range(size)) if rank == 0 else [0, 1]
    for _ in range(2):
        text = raised(lambda: dist.new_group(ranks, timeout=timedelta(seconds=15)))
        parallel_assert(("names other members" in text) == (rank < 2), text)
        group = dist.new_group()
        parallel_assert(sum_over(group) == size * (size - 1) // 2)
        dist.destroy_process_group(group)
