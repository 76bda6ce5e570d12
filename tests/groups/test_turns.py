"""Threads that make groups at the same time, in orders that differ between the ranks."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
from group_cases import place

import hpcdist as dist
from hpcdist.testing import parallel_assert

pytestmark = pytest.mark.ranks

THREADS, ROUNDS = 3, 8
TIMEOUT = timedelta(seconds=20)


def in_threads(act: Callable[[int], Any], threads: int = THREADS) -> list[Any]:
    """Run `act(i)` in each of some threads; return what it returned or raised."""
    found: list[Any] = [None] * threads

    def run(i: int) -> None:
        try:
            found[i] = act(i)
        except Exception as error:
            found[i] = error

    all_ = [threading.Thread(target=run, args=(i,)) for i in range(threads)]
    for each in all_:
        each.start()
    for each in all_:
        each.join()
    return found


def pause(rng: random.Random) -> None:
    time.sleep(rng.random() * 0.002)


def test_groups_of_the_same_ranks():
    """Which threads get one group is not said; but each is a whole group, and all come out."""
    rank, size = place()

    def make(i: int) -> list[Any]:
        rng = random.Random(rank * 10 + i)
        made = []
        for _ in range(ROUNDS):
            pause(rng)
            made.append(dist.new_group(timeout=TIMEOUT))
        return made

    found = in_threads(make)
    parallel_assert(all(isinstance(each, list) for each in found), found)

    def number(group):
        return int(group.members.name.split("#")[1])

    groups = sorted((g for made in found for g in made), key=number)
    names = [g.members.name for g in groups]
    parallel_assert(len(set(names)) == THREADS * ROUNDS, names)
    for group in groups:
        mine = np.ones(1)
        dist.all_reduce(mine, group=group)
        parallel_assert(mine[0] == size)
        dist.destroy_process_group(group)


def test_groups_of_other_ranks_in_each_thread():
    """Members lists that overlap; each thread uses and destroys its groups at once."""
    rank, size = place()
    lists = [
        list(range(size)),
        list(range(size))[::-1],
        [*range(1, size), 0],
        list(range(size - 1)),
    ]
    lists = [list(x) for x in dict.fromkeys(tuple(x) for x in lists if x)]

    def make(i: int) -> list[float]:
        rng = random.Random(rank * 10 + i)
        sums = []
        for _ in range(ROUNDS):
            pause(rng)
            group = dist.new_group(lists[i], timeout=TIMEOUT, sort_ranks=False)
            if rank not in lists[i]:
                continue
            mine = np.ones(1)
            dist.all_reduce(mine, group=group)
            sums.append(float(mine[0]))
            dist.destroy_process_group(group)
        return sums

    for i, found in enumerate(in_threads(make, len(lists))):
        times = ROUNDS if rank in lists[i] else 0
        parallel_assert(found == [float(len(lists[i]))] * times, found)


def test_a_late_thread_makes_the_group_with_the_others():
    """Another thread's roll call neither swallows its words nor takes them for a mistake."""
    rank, size = place()
    order = [0, 1] if rank % 2 else [1, 0]
    lists = [list(range(size)), list(range(size))[::-1]]

    def make(i: int) -> int:
        if i == order[1]:
            time.sleep(0.4)
        group = dist.new_group(lists[i], timeout=TIMEOUT, sort_ranks=False)
        name = group.size()
        dist.destroy_process_group(group)
        return name

    parallel_assert((found := in_threads(make, 2 if size > 1 else 1)) == [size] * len(found), found)


def test_threads_whose_ranks_disagree_fail_within_the_timeout():
    rank, size = place()
    if size == 1:
        return
    lists = [list(range(size)), list(range(size))[::-1]]
    done = threading.Event()
    beside = threading.Thread(target=done.wait)
    beside.start()
    began = time.monotonic()
    error = None
    try:
        dist.new_group(lists[rank == size - 1], timeout=timedelta(seconds=1), sort_ranks=False)
    except (dist.DistTimeoutError, dist.DistMismatchError) as raised:
        error = raised
    spent = time.monotonic() - began
    done.set()
    beside.join()
    parallel_assert(error is not None and spent < 5, f"{error!r}, {spent}")
    group = dist.new_group(timeout=TIMEOUT)  # a failed call does not count
    dist.destroy_process_group(group)


def test_a_thread_waits_for_its_turn_no_longer_than_its_timeout():
    """One thread of each rank waits for a rank that comes later, the other for its turn."""
    rank, size = place()
    if size == 1:
        return
    seconds = [1.5, 0.4]

    def make(i: int) -> Any:
        time.sleep(0.2 * i)
        try:
            return dist.new_group(timeout=timedelta(seconds=seconds[i]))
        except dist.DistTimeoutError as error:
            return error

    began = time.monotonic()
    found = in_threads(make, 2) if rank else []
    spent = time.monotonic() - began
    parallel_assert(all(isinstance(each, dist.DistTimeoutError) for each in found), found)
    parallel_assert(not found or "other threads of this rank" in str(found[1]), found)
    parallel_assert(spent < 5, spent)
    dist.destroy_process_group(dist.new_group(timeout=TIMEOUT))
