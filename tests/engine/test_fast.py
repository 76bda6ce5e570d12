"""HPCDIST_CHECK=fast: between nodes a call with a letter ends with the first round of the check.

A rank may give up a call from which others go on. Then the ranks are apart, and all later calls of
the group fail. Here that is brought about, in test_letters.py it comes at random.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from cases import Check, here
from worlds import LAYOUTS, SHORT, between_nodes, layouts, start_with, true_place

import hpcdist as dist
from hpcdist.testing import parallel_assert, parallel_raises

pytestmark = [pytest.mark.ranks, pytest.mark.mpi(min_size=2)]

#: Seconds of the rank that gives up, and until the others come: for no longer than 10 ms they take
#: it that nobody has given up.
PATIENCE, LATE = 0.001, 0.004
#: Elements that are too many for a letter.
LONG = 50_000
APART = "from which other ranks have gone on"


@pytest.fixture(params=["apiece", LAYOUTS[0], LAYOUTS[1]])
def group(request, no_world, monkeypatch):
    """Ranks on nodes of their own, or on two nodes."""
    if request.param == "apiece":
        dist.init_process_group(timeout=SHORT)
        made = between_nodes(SHORT, "fast")
    else:
        nodes = layouts(true_place()[1])[LAYOUTS.index(request.param)]
        said = start_with(monkeypatch, HPCDIST_NODES=nodes, HPCDIST_CHECK="fast")
        parallel_assert(said == "", said)
        made = dist.new_group(timeout=SHORT)
    yield made
    dist.destroy_process_group()


def part(group: dist.ProcessGroup, giving: int) -> None:
    """Let that rank give up a call from which ranks of other nodes go on."""
    rank, size = here()
    seconds, outcomes = group.carrier.timeout, [0] * size
    nodes: list = [None] * size
    dist.all_gather_object(nodes, group.carrier.node_ranks)
    for number in range(2_000):
        dist.barrier(group)
        tensor = torch.tensor([number * 10 + rank])
        if rank == giving:
            group.carrier.timeout = PATIENCE
        elif nodes[rank] != nodes[giving] or group.carrier.checks_through == "MPI":
            time.sleep(LATE)
        try:
            dist.all_reduce(tensor, group=group)
            right = sum(number * 10 + each for each in range(size))
            outcome = 1 if int(tensor) == right else -2
        except dist.DistTimeoutError:
            outcome = -1 if int(tensor) == number * 10 + rank else -2
        group.carrier.timeout = seconds
        dist.all_gather_object(outcomes, outcome)
        parallel_assert(-2 not in outcomes, f"{outcomes}")
        if set(outcomes) == {1, -1}:
            return
    parallel_assert(False, "the ranks have always been of one mind")


def again(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Make a group of the same kind."""
    if group.carrier.checks_through == "MPI":
        return between_nodes(SHORT, "fast")
    return dist.new_group(timeout=SHORT)


def is_in_step(group: dist.ProcessGroup) -> bool:
    """Whether a short call, a long one and a barrier have their results."""
    size = here()[1]
    for n in (3, LONG):
        total = torch.ones(n)
        dist.all_reduce(total, group=group)
        if not bool((total == size).all()):
            return False
    dist.barrier(group)
    return True


#: What the ranks call next.
NEXT: dict[str, Callable[[dist.ProcessGroup, torch.Tensor], object]] = {
    "the same": lambda g, t: dist.all_reduce(t[:1], group=g),
    "a long call": lambda g, t: dist.all_reduce(t, group=g),
    "another call": lambda g, t: dist.broadcast(t[:5], 0, g),
    "a barrier": lambda g, t: dist.barrier(g),
    "without waiting": lambda g, t: dist.all_reduce(t[:1], group=g, async_op=True).wait(),
    "lists": lambda g, t: dist.all_gather([t[i : i + 1] for i in range(here()[1])], t[-1:], g),
    "an object": lambda g, t: dist.all_gather_object([None] * here()[1], "an object", g),
    "different calls": lambda g, t: (
        dist.barrier(g) if here()[0] else dist.reduce(t[:2], 0, group=g)
    ),
}


@pytest.mark.parametrize("name", NEXT)
def test_all_later_calls_fail_on_all_ranks(group, name):
    check, (rank, size) = Check(), here()
    for giving in (0, size - 1):
        made = again(group)
        part(made, giving)
        tensor = torch.full((LONG,), float(rank))
        for each in (name, name, "a barrier", "the same", "a long call"):
            with parallel_raises(dist.DistTimeoutError, match=APART):
                NEXT[each](made, tensor)
        check.that(bool((tensor == rank).all()), "its tensor has changed")
        dist.destroy_process_group(made)
    check.that(is_in_step(again(group)), "a new group")
    check.done()


def test_nor_can_calls_be_paired_wrongly(group):
    """The ranks leave a call of several rounds at different rounds, and go on to the next one."""
    rank, size = here()
    part(group, size - 1)
    for number in range(5):
        parts = [(number, each) for each in range(size)]
        received: list[object] = [None]
        with parallel_raises(dist.DistTimeoutError, match=APART):
            if rank != size - 1:
                dist.all_reduce(torch.ones(1), group=group)
            dist.scatter_object_list(received, parts if rank == 0 else None, 0, group)
        parallel_assert(received == [None], f"{received}")


@pytest.mark.parametrize("refusing", ["went", "gave up", "all"])
def test_a_rank_that_refuses_the_next_call_hears_it_later(group, refusing):
    rank, size = here()
    giving = size - 1
    part(group, giving)
    mine = refusing == "all" or (rank == giving) == (refusing == "gave up")
    tensor: object = "no tensor" if mine else torch.ones(2)
    with parallel_raises(Exception):
        dist.broadcast(tensor, 0, group)
    with parallel_raises(dist.DistTimeoutError, match=APART):
        dist.all_reduce(torch.ones(2), group=group)


def test_the_error_names_the_rank_that_gave_up(group):
    rank, size = here()
    part(group, size - 1)
    with pytest.raises(dist.DistTimeoutError) as caught:
        dist.all_reduce(torch.ones(2), group=group)
    text = str(caught.value)
    same_node = range(size) if group.carrier.checks_through != "MPI" else [size - 1]
    parallel_assert(any(f"rank {each} gave up" in text for each in same_node), text)
    for words in ("HPCDIST_CHECK=fast", "all_reduce(float32[2]", "Make a new group"):
        parallel_assert(words in text, text)


def test_the_others_do_not_wait_for_a_rank_that_gave_up(group):
    """It calls only once they have their error."""
    rank, size = here()
    part(group, size - 1)
    began = time.monotonic()
    if rank == size - 1:
        dist.barrier()
    with parallel_raises(dist.DistTimeoutError, match=APART):
        try:
            dist.all_reduce(torch.ones(2), group=group)
        finally:
            took = time.monotonic() - began
            if rank != size - 1:
                dist.barrier()
    parallel_assert(took < 0.5 * SHORT.total_seconds(), f"{took} s")


def test_operations_in_flight_fail_with_it(group):
    rank, size = here()
    part(group, 0)
    tensors = [torch.full((n,), float(rank)) for n in (1, LONG, 2)]
    works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
    for work in works:
        with parallel_raises(dist.DistTimeoutError):
            work.wait()
    parallel_assert(all(bool((tensor == rank).all()) for tensor in tensors))


def test_a_group_that_is_destroyed_next(group):
    part(group, 0)
    dist.destroy_process_group(group)
    total = torch.ones(3)
    dist.all_reduce(total)
    parallel_assert(bool((total == here()[1]).all()))


def test_a_mismatch_is_told_on_all_ranks_and_the_group_goes_on(group):
    rank, size = here()
    odd = rank == size - 1
    for n in (1, 500, LONG):
        calls = (
            lambda n=n: dist.all_reduce(torch.ones(n + odd), group=group),
            lambda n=n: dist.broadcast(torch.ones(n), int(odd), group),
            lambda n=n: dist.barrier(group) if odd else dist.all_reduce(torch.ones(n), group=group),
        )
        for call in calls:
            with parallel_raises(dist.DistMismatchError, match="disagree"):
                call()
            parallel_assert(is_in_step(group), f"{n}")


def test_a_late_rank_hears_that_the_others_have_given_up(group):
    """Once it has been away for longer, so they are of one mind."""
    rank, size = here()
    group.carrier.timeout = 0.2 if rank else 20
    tensor = torch.full((3,), float(rank))
    if rank == 0:
        time.sleep(1.0)
    with parallel_raises(dist.DistTimeoutError, match="gave up|timeout after"):
        dist.all_reduce(tensor, group=group)
    parallel_assert(bool((tensor == rank).all()))
    group.carrier.timeout = 20
    parallel_assert(is_in_step(group))
