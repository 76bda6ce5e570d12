"""Letters of several messages: 4 to 64 KiB of data that travel with the check between nodes."""

import random
import time

import pytest
import torch
from carried import (
    calls_that_a_handler_ends,
    infinities_and_nans,
    outputs_that_late_ranks_leave,
    stopped_anywhere,
    sums_in_the_order_of_doubling,
)
from cases import MOVED, Check, here, pairs
from forms import MOVES, REDUCTIONS
from giving_up import Endings
from mpis import OPEN_MPI_LIMITS
from worlds import LAYOUTS, SHORT, between_nodes, layouts, start_with, true_place

import hpcdist as dist
from hpcdist.testing import parallel_assert, parallel_raises

pytestmark = [pytest.mark.ranks, pytest.mark.mpi(min_size=2)]

#: Bytes of a message and of the longest letters of all operations, between two nodes.
MESSAGE, LIMITS = 3968, (3840, 4 << 10, 8 << 10, 16 << 10, 32 << 10, 64 << 10)
MOST_SHORT = LIMITS[0]  # between any nodes
ROOM = 128 << 10  # bytes that the ranks of a node share for letters


#: Layouts of the ranks, and levels of the entry check.
GROUPS = (
    ("apiece", "on"),
    ("apiece", "fast"),
    *zip(LAYOUTS, ("on", "fast", "on", "fast"), strict=True),
)


@pytest.fixture(params=GROUPS, ids=[", ".join(each) for each in GROUPS])
def group(request, no_world, monkeypatch):
    """Ranks on nodes of their own, or on two nodes."""
    size = true_place()[1]
    layout, level = request.param
    if layout == "apiece":
        dist.init_process_group(timeout=SHORT)
        made = between_nodes(SHORT, level)
    else:
        nodes = layouts(size)[LAYOUTS.index(layout)]
        said = start_with(monkeypatch, HPCDIST_NODES=nodes, HPCDIST_CHECK=level)
        parallel_assert(said == "", said)
        made = dist.new_group(timeout=SHORT)
    parallel_assert("MPI" in made.carrier.checks_through, made.carrier.checks_through)
    yield made
    dist.destroy_process_group()


def lengths(rng, itemsize: int) -> list[int]:
    """Elements on both sides of a limit: where they are the whole letter, and a part of one."""
    size = here()[1]
    limit = int(rng.choice([*LIMITS, 2 * MESSAGE, 4 * MESSAGE]))
    others = int(rng.integers(1, size))
    at = limit // others // itemsize // int(rng.choice([1, size, size**2]))
    return [max(1, at - int(rng.integers(0, 40))), max(1, at), at + 1]


#: Each call of a tensor of n int32 for each rank, by how many of them a letter has, and the KiB of
#: the longest letters between two nodes of one rank and of several: with Open MPI and with MPICH.
CALLS = {
    "all_reduce": (lambda n, g: dist.all_reduce(ones(n), group=g), 0, (16, 32), (32, 64)),
    "reduce": (lambda n, g: dist.reduce(ones(n), 0, group=g), 0, (4, 16), (64, 64)),
    "broadcast": (lambda n, g: dist.broadcast(ones(n), 0, g), 0, (4, 8), (8, 32)),
    "reduce_scatter": (
        lambda n, g: dist.reduce_scatter_tensor(ones(n), ones(n * here()[1]), group=g),
        1, (16, 32), (64, 64),
    ),
    "all_gather": (
        lambda n, g: dist.all_gather_into_tensor(ones(n * here()[1]), ones(n), g),
        1, (16, 32), (16, 64),
    ),
    "gather": (lambda n, g: dist.gather(ones(n), on_first(n), 0, g), 1, (8, 32), (16, 64)),
    "scatter": (lambda n, g: dist.scatter(ones(n), on_first(n), 0, g), 1, (8, 32), (16, 32)),
    "all_to_all": (
        lambda n, g: dist.all_to_all_single(ones(n * here()[1]), ones(n * here()[1]), group=g),
        2, (4, 32), (16, 32),
    ),
}  # fmt: skip


def ones(n: int) -> torch.Tensor:
    return torch.ones(n, dtype=torch.int32)


def on_first(n: int) -> list[torch.Tensor] | None:
    rank, size = here()
    return None if rank else [ones(n) for _ in range(size)]


@pytest.mark.parametrize("name", CALLS)
def test_what_travels_as_a_letter(group, name):
    """Up to the limit of each call; none of the other tests sees which way data has taken."""
    check, (_, size) = Check(), here()
    call, power, open_mpi, mpich = CALLS[name]
    apiece, together = open_mpi if OPEN_MPI_LIMITS else mpich
    shared = group.carrier.checks_through != "MPI"
    nodes: list = [None] * size
    dist.all_gather_object(nodes, group.carrier.node_ranks)
    others = (len(set(nodes)) if shared else size) - 1
    most = max((together if shared else apiece) << 10, MOST_SHORT * others) // others
    most = min(most, ROOM // max(nodes.count(node) for node in nodes) // 8 * 8) if shared else most
    fits = most // 4 // size**power
    for n, letters in ((1, 1), (fits, 1), (fits + 1, 0), (2 * fits, 0)):
        before = group.carrier.carried
        call(n, group)
        check.that(group.carrier.carried - before == letters, f"{n} of {fits}: not {letters}")
    check.done()


@pytest.mark.parametrize("form", MOVES, ids=lambda form: form.__name__)
def test_moves_around_the_limits(rng, group, form):
    check = Check()
    for dtype in rng.permutation(len(MOVED))[:6]:
        for n in lengths(rng, MOVED[dtype].itemsize):
            form(rng, check, MOVED[dtype], n, bool(rng.integers(2)), group)
    check.done()


@pytest.mark.parametrize("form", REDUCTIONS, ids=lambda form: form.__name__)
def test_reductions_around_the_limits(rng, group, form):
    check, every = Check(), pairs()
    for at in rng.permutation(len(every))[:12]:
        name, _, dtype = every[at]
        for n in lengths(rng, dtype.itemsize):
            form(rng, check, name, dtype, n, bool(rng.integers(2)), group)
    check.done()


def test_each_rank_has_the_sum_of_doubling(rng, no_world):
    """A long letter changes no bit."""
    dist.init_process_group(timeout=SHORT)
    longest = (16 << 10) // 4 // (true_place()[1] - 1)
    sizes = {min(n, longest) for n in (MESSAGE // 4, MESSAGE // 2, longest)}
    sums_in_the_order_of_doubling(rng, between_nodes(SHORT), sorted(sizes))
    dist.destroy_process_group()


def test_infinities_and_nans(group):
    infinities_and_nans(group, (1000, 2000))


def test_a_late_rank_leaves_outputs_untouched_and_all_can_retry(rng, group):
    outputs_that_late_ranks_leave(rng, group, 1000, {0, here()[1] - 1})


def test_a_rank_that_refuses_or_calls_something_else(rng, group):
    check, (rank, size) = Check(), here()
    for n in (1000, 1500, 2000):
        tensor = torch.full((n + (rank == size - 1),), rank)
        before = tensor.clone()
        with parallel_raises(dist.DistMismatchError):
            dist.all_reduce(tensor, group=group)
        check.equal(tensor, before, f"n={n}")
        with parallel_raises(Exception):
            dist.broadcast(tensor if rank else "no tensor", 0, group=group)
        check.equal(tensor, before, f"n={n}, refused")
        for form in REDUCTIONS[:1]:
            form(rng, check, "SUM", torch.int64, n, False, group=group)
    check.done()


def test_a_signal_handler_that_raises(group):
    calls_that_a_handler_ends(group, 1500)


def test_ranks_that_are_stopped_anywhere(rng, group):
    check = Check()
    with stopped_anywhere():
        for turn in range(4):
            for form in MOVES[:2]:
                form(rng, check, torch.int32, 500 * (turn + 1), turn % 2 == 1, group=group)
            for form in REDUCTIONS[::2]:
                form(rng, check, "SUM", torch.int32, 700 * (turn + 1), turn % 2 == 1, group=group)
    check.done()


def test_no_mixed_outcomes_when_ranks_give_up_at_random(group):
    """Late ranks and a short timeout: the endings are as they must be.

    The timeout, 2 ms at first, grows until a call has succeeded on this machine.
    """
    check, (rank, size) = Check(), here()
    endings = Endings(check, group)
    patience, good = 0.002, 0
    luck = random.Random(rank)
    for number in range(80):
        group.carrier.timeout = patience
        time.sleep(luck.choice((0.0, 0.0, 0.0, 2 * patience * luck.random())))
        n = (480, 1000, 2000, 4000)[number % 4]
        tensor = torch.full((n,), rank + number)
        try:
            dist.all_reduce(tensor, group=group)
            result = int(bool((tensor == sum(range(size)) + number * size).all()))
        except dist.DistTimeoutError:
            result = -1 if bool((tensor == rank + number).all()) else -2
        good += endings.judge(number, result) == {1}
        if not good:
            patience = min(1.3 * patience, 1.0)
    check.that(good > 0 or endings.apart, "no call succeeded")
    group.carrier.timeout = 20.0
    endings.end()
    check.done()
