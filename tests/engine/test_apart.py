"""Groups between nodes that end apart: one rank has begun checks that the others never begin.

MPI gives a freed communicator's number, and with it what is unread there, to the next one.
"""

import pytest
import torch
from cases import Check
from worlds import LAYOUTS, layouts, start_with, true_place

import hpcdist as dist
from hpcdist.testing import parallel_assert

pytestmark = [pytest.mark.ranks, pytest.mark.mpi(min_size=3)]

#: Each rank on a node of its own, as far as it knows; and two nodes.
PLACES = ("messages", *LAYOUTS)


@pytest.fixture(params=PLACES)
def world(request, no_world, monkeypatch):
    """Start the default group on such nodes."""
    variables = {"HPCDIST_CHECK_TRANSPORT": "mpi"}
    if request.param in LAYOUTS:
        at = LAYOUTS.index(request.param)
        variables = {"HPCDIST_NODES": layouts(true_place()[1])[at]}
    said = start_with(monkeypatch, **variables)
    parallel_assert(said == "", said)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)  # each new group reads it
    through = dist.new_group().carrier.checks_through
    parallel_assert("MPI" in through, through)
    yield true_place()
    dist.destroy_process_group()


def give_up(group, times: int) -> None:
    """Begin calls that the others never make."""
    group.carrier.timeout = 0.02
    for _ in range(times):
        with pytest.raises(dist.DistTimeoutError):
            dist.all_reduce(torch.ones(1), group=group)


def test_what_one_rank_gave_up_reaches_no_later_group(world):
    """Also where the others have made no call of the group, and no rank destroys it."""
    check, (rank, size) = Check(), world
    for turn in range(2 * size):
        former, ahead = dist.new_group(), turn % size
        if turn < size:
            dist.all_reduce(torch.ones(1), group=former)
        dist.barrier()
        if rank == ahead:
            give_up(former, 1 + turn % 2)
        dist.barrier()
        del former
        others = [r for r in range(size) if r != ahead]
        for ranks in 5 * [others if rank != ahead else [rank]]:
            after = dist.new_group(ranks, use_local_synchronization=True)
            total = torch.ones(3)
            try:
                dist.all_reduce(total, group=after)
                check.that(total.tolist() == [len(ranks)] * 3, f"turn {turn}: {total}")
            except dist.DistError as error:
                check.that(False, f"turn {turn}, rank {ahead} was ahead: {error}")
            dist.destroy_process_group(after)
        dist.barrier()
    check.done()


def test_a_rank_that_destroys_a_group_early_keeps_no_communicator(world):
    """The others make one call more, which fails, and so their end of it is another check."""
    check, (rank, size) = Check(), world
    former = dist.new_group()
    dist.all_reduce(torch.ones(1), group=former)
    dist.barrier()
    if rank == size - 1:
        dist.destroy_process_group(former)
    else:
        with pytest.raises(dist.DistError):
            dist.all_reduce(torch.ones(1), group=former)
        dist.destroy_process_group(former)
    for _ in range(5):
        after = dist.new_group(list(range(size - 1)))
        total = torch.ones(3)
        if rank < size - 1:
            try:
                dist.all_reduce(total, group=after)
            except dist.DistError as error:
                check.that(False, str(error))
            dist.destroy_process_group(after)
    check.done()
