"""The entry check between nodes of several ranks each: one rank of a node votes for all of them."""

import os
import signal
import time
from datetime import timedelta

import numpy as np
import pytest
import torch
from carried import calls_that_a_handler_ends
from cases import Check, pairs
from forms import MOVES, REDUCTIONS
from giving_up import give_up_at_random
from lateness import names, once_others_have_ended
from resources import held
from worlds import LAYOUTS, SHORT, layouts, start_with, true_place, works

import hpcdist as dist
from hpcdist.testing import parallel_assert, parallel_raises

pytestmark = [pytest.mark.ranks, pytest.mark.mpi(min_size=3)]

THROUGH = "shared memory and MPI"


@pytest.fixture(params=range(len(LAYOUTS)), ids=LAYOUTS)
def group(request, no_world, monkeypatch):
    """Start the default group on such nodes; a second group of all ranks, to fail."""
    said = start_with(monkeypatch, HPCDIST_NODES=layouts(true_place()[1])[request.param])
    parallel_assert(said == "", said)
    made = dist.new_group(timeout=SHORT)
    through = {made.carrier.checks_through, dist.group.WORLD.carrier.checks_through}
    parallel_assert(through == {THROUGH}, through)
    yield made
    dist.destroy_process_group()


def right(group) -> bool:
    """Whether the group can still be used."""
    size = dist.get_world_size()
    total = torch.ones(3)
    dist.all_reduce(total, group=group)
    return total.tolist() == [size] * 3


@pytest.mark.parametrize("check", ["off", "on"])
def test_no_message_reaches_the_next_group(group, check):
    """MPI gives a freed communicator's number to the next: none may go with messages unread.

    Each rank of a monitored barrier tells all others that it is there, also where nothing else is
    checked. A rank that listens makes no call of MPI there, and so has not even received it.
    """
    for _ in range(4):
        former = dist.new_group(pg_options=dist.MPIOptions(check=check))
        for _ in range(3):
            dist.monitored_barrier(former, timedelta(seconds=20))
        dist.destroy_process_group(former)
        after = dist.new_group()
        if dist.get_rank() == 0:
            time.sleep(0.12)  # the others look for messages meanwhile
        dist.barrier(after)
        dist.destroy_process_group(after)


def test_every_form_with_and_without_letters(rng, group):
    check, size = Check(), true_place()[1]
    for n in (1, 128 // size, 256 // size, 256, 257, 3001):
        for async_op in (False, True):
            for form in MOVES:
                form(rng, check, torch.float32, n, async_op, group)
            for form in REDUCTIONS:
                form(rng, check, "SUM", torch.float32, n, async_op, group)
    for name, _, dtype in pairs()[::5]:
        for form in REDUCTIONS[:2]:
            form(rng, check, name, dtype, 3, False, group)
    check.done()


def ended_before(late: int, group, signals=()) -> str:
    """Make a call that rank `late` begins once all others have ended theirs; what its error says.

    Then, before the late rank is told, send signals: pairs for os.kill.
    """
    with once_others_have_ended(late):
        try:
            dist.all_reduce(torch.ones(3), group=group)
        except dist.DistTimeoutError as error:
            return str(error)
        finally:
            for pid, number in signals:
                os.kill(pid, number)
    return ""


def test_whoever_is_late_is_named(group):
    """Also one that votes for others, and one for whom another one votes."""
    check, (rank, size) = Check(), true_place()
    for late in (0, 1, size - 1):
        group.carrier.timeout = 0.3
        dist.barrier()
        text = ended_before(late, group)
        # A rank that the machine has kept from its call is named as well.
        named = "not joined" in text and names(text, late)
        check.that(rank == late or named or "gave up after" in text, text)
        check.that("can still be used" in text, text)
        group.carrier.timeout = 20
        dist.barrier()
        check.that(right(group), f"after rank {late} was late")
    check.done()


def test_a_stopped_rank_keeps_no_other(group):
    check, (rank, size) = Check(), true_place()
    pids: list = [None] * size
    dist.all_gather_object(pids, os.getpid())
    for stopped in (0, 1):
        other = (stopped + 1) % size
        group.carrier.timeout = 0.3
        dist.barrier()
        if rank == other:
            os.kill(pids[stopped], signal.SIGSTOP)
        # It is stopped while it waits for the words of the others.
        wake = [(pids[stopped], signal.SIGCONT)] if rank == other else []
        text = ended_before(stopped, group, wake)
        check.that(bool(text), f"beside rank {stopped}, which was stopped: no error")
        group.carrier.timeout = 20
        dist.barrier()
        check.that(right(group), f"after rank {stopped} was stopped")
    check.done()


def test_a_refusal_and_a_mismatch_reach_all(group):
    rank, size = true_place()
    for odd in range(size):
        with parallel_raises((TypeError, dist.DistMismatchError), match="tensor is a str"):
            dist.all_reduce("no tensor" if rank == odd else torch.ones(3), group=group)
        parallel_assert(right(group))
        with parallel_raises(dist.DistMismatchError, match=rf"rank {odd}: all_reduce\(float32\[4"):
            dist.all_reduce(torch.ones(4 if rank == odd else 3), group=group)
        parallel_assert(right(group))


def test_a_handler_that_raises_ends_the_check_for_all(group):
    calls_that_a_handler_ends(group, 3)


def test_no_mixed_outcomes_when_ranks_give_up_at_random(group, count):
    give_up_at_random(group, count)


def test_groups_of_any_shape(group):
    """Of some ranks of each node, one of each, one node; used at the same time."""
    check, (rank, size) = Check(), true_place()
    chosen = [list(range(size))[::-1], [2, 1, 0], [0, 1], list(range(0, size, 2))]
    groups = [dist.new_group(ranks) for ranks in chosen]
    for turn in range(6):
        jobs = []
        for made, ranks in zip(groups, chosen, strict=True):
            if rank in ranks:
                x = torch.full((1 + 40 * (turn % 2),), rank + turn)
                jobs.append((dist.all_reduce(x, group=made, async_op=True), x, ranks))
        for work, x, ranks in jobs:
            work.wait()
            want = sum(r + turn for r in ranks)
            check.that(bool((x == want).all()), f"turn {turn} of {ranks}: {x[0]}")
    check.done()


def test_nothing_is_left_of_a_group(group):
    def some(n: int) -> None:
        for _ in range(n):
            made = dist.new_group(timeout=timedelta(seconds=20))
            dist.all_reduce(torch.ones(2), group=made)
            dist.destroy_process_group(made)
        dist.barrier()

    some(3)
    before = held()
    some(10)
    after = held()
    grown = (after.mappings - before.mappings, after.shm - before.shm, after.files - before.files)
    parallel_assert(max(grown) <= 0, grown)
    parallel_assert(works)


def test_numpy_arrays_go_the_same_way(group):
    rank, size = true_place()
    x = np.full(2, rank + 1.0)
    dist.all_reduce(x, group=group)
    parallel_assert(bool((x == size * (size + 1) / 2).all()))
