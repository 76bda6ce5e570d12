"""HPCDIST_NAN_CHECK: a rank's NaN is an error on all ranks, in place of a wrong result."""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from cases import COMPLEX, FLOAT8, FLOATS, Check, here
from nans import NAN, error_of
from worlds import between_nodes, start_with, works

import hpcdist as dist
from hpcdist import _engine

pytestmark = pytest.mark.ranks

#: Elements per rank: carried by the entry check, in one piece, and in several.
SIZES = (2, 500, 300_000)


@pytest.fixture(autouse=True)
def looking():
    """Look for NaNs on this rank, as with HPCDIST_NAN_CHECK=1."""
    _engine.look_for_nans(True)
    yield
    _engine.look_for_nans(False)


class Parts:
    """What one rank gives to a call, with a NaN on one rank, and what it receives into."""

    def __init__(self, n: int, bad: int, at: int) -> None:
        self.rank, self.size = here()
        self.n, self.bad, self.at = n, bad, at
        self.outputs: list[torch.Tensor] = []

    def whole(self, blocks: int = 1) -> torch.Tensor:
        """An input of n elements per block; the NaN is in the last block."""
        x = torch.arange(1.0, self.n * blocks + 1)
        if self.rank == self.bad:
            x[self.n * (blocks - 1) + self.at] = NAN
        return x

    def blocks(self) -> list[torch.Tensor]:
        """One input per rank; the NaN is in the last one."""
        return [t.clone() for t in self.whole(self.size).split(self.n)]

    def in_place(self) -> torch.Tensor:
        """An input that is the output too."""
        self.outputs.append(self.whole())
        return self.outputs[-1]

    def out(self, blocks: int = 1) -> torch.Tensor:
        """An output, of a NaN in each element: nobody reads it."""
        self.outputs.append(torch.full((self.n * blocks,), NAN))
        return self.outputs[-1]

    def outs(self) -> list[torch.Tensor]:
        """One output per rank."""
        return [self.out() for _ in range(self.size)]


def at_root(p: Parts, make: Callable[[], Any]) -> Any:
    """What only the bad rank passes, which is the root."""
    return make() if p.rank == p.bad else None


#: Every collective, with its tensors.
CALLS: dict[str, Callable[..., Any]] = {
    "all_reduce": lambda p, **how: dist.all_reduce(p.in_place(), **how),
    "all_reduce_coalesced": lambda p, **how: dist.all_reduce_coalesced(
        [p.in_place(), p.in_place()], **how
    ),
    "reduce": lambda p, **how: dist.reduce(p.in_place(), 0, **how),
    "reduce_scatter": lambda p, **how: dist.reduce_scatter(p.out(), p.blocks(), **how),
    "reduce_scatter_single": lambda p, **how: dist.reduce_scatter_single(
        p.out(), p.whole(p.size), **how
    ),
    "broadcast": lambda p, **how: dist.broadcast(p.in_place(), p.bad, **how),
    "scatter": lambda p, **how: dist.scatter(p.out(), at_root(p, p.blocks), p.bad, **how),
    "gather": lambda p, **how: dist.gather(p.whole(), at_root(p, p.outs), p.bad, **how),
    "all_gather": lambda p, **how: dist.all_gather(p.outs(), p.whole(), **how),
    "all_gather_single": lambda p, **how: dist.all_gather_single(p.out(p.size), p.whole(), **how),
    "all_gather_coalesced": lambda p, **how: dist.all_gather_coalesced(
        [[a] for a in p.outs()], [p.whole()], **how
    ),
    "all_to_all": lambda p, **how: dist.all_to_all(p.outs(), p.blocks(), **how),
    "all_to_all_single": lambda p, **how: dist.all_to_all_single(
        p.out(p.size), p.whole(p.size), **how
    ),
    "all_to_all_single, by splits": lambda p, **how: dist.all_to_all_single(
        p.out(p.size), p.whole(p.size), [p.n] * p.size, [p.n] * p.size, **how
    ),
}
#: Of one tensor whose last block contains the NaN.
IN_BLOCKS = ("reduce_scatter_single", "all_to_all_single", "all_to_all_single, by splits")
#: Names in errors, where they are not those above.
PUBLIC = {
    "reduce_scatter_single": "reduce_scatter_tensor",
    "all_gather_single": "all_gather_into_tensor",
    "all_to_all_single, by splits": "all_to_all_single",
}


def told(error: Exception | None, ranks: tuple[int, ...], *texts: str) -> str:
    """What is wrong with the error of a collective; empty if nothing is."""
    if not isinstance(error, dist.DistNaNError):
        return f"{type(error).__name__}: {error}"
    if error.refusal is None or not set(error.refusal.ranks) <= set(ranks):
        return f"{error.refusal} for {ranks}"
    lacking = [text for text in texts if not re.search(text, str(error))]
    return f"{lacking} not in: {error}" if lacking else ""


@pytest.mark.parametrize("later", [False, True])
def test_every_collective_on_every_rank(later, count):
    check, (rank, size) = Check(), here()
    groups = {"": None, "over MPI": between_nodes()}
    cases = 0
    for name, call in CALLS.items():
        for n in SIZES:
            bad, at = cases % size, n - 1 - cases % 2
            where, group = list(groups.items())[cases % 2]
            p = Parts(n, bad, at)
            error = error_of(functools.partial(call, p, group=group, async_op=later))
            label = f"{name}, {n} elements on rank {bad} {where}"
            index = at + n * (size - 1) * (name in IN_BLOCKS)
            who = "^NaN" if rank == bad else f"^rank {bad} refused its input: NaN"
            wrong = told(
                error,
                (bad,),
                who,
                rf"NaN at element {index} of \d+",
                r"engine/test_nan_check.py:\d+",
                rf"{PUBLIC.get(name, name)}\(float32",
            )
            check.that(not wrong, f"{label}: {wrong}")
            for out in p.outputs:
                fresh = p.whole() if not bool(out.isnan().all()) else out
                check.that(
                    torch.equal(out.nan_to_num(-1), fresh.nan_to_num(-1)),
                    f"{label}: something was written",
                )
            check.that(works(), f"{label}: the group does not work any more")
            cases += 1
    count(cases)
    dist.destroy_process_group(groups["over MPI"])
    check.done()


@pytest.mark.parametrize("later", [False, True])
def test_nothing_but_inputs_counts(later):
    """Outputs are NaNs in all calls; here tensors of ranks whose data nobody reads are, too."""
    check, (rank, size) = Check(), here()
    for name, call in CALLS.items():
        p = Parts(500, bad=-1, at=0)
        if name in ("broadcast", "scatter", "gather"):
            p.bad = 0  # the root
            p.whole = lambda blocks=1: torch.full((500 * blocks,), 2.0)
        check.that(error_of(functools.partial(call, p, async_op=later)) is None, name)
    x = torch.full((3,), 1.0 if rank == size - 1 else NAN)
    check.that(error_of(lambda: dist.broadcast(x, size - 1, async_op=later)) is None, "broadcast")
    check.that(x.tolist() == [1.0] * 3, f"{x}")
    objects = [None] * size
    dist.all_gather_object(objects, {"loss": NAN})
    check.that(all(np.isnan(each["loss"]) for each in objects), f"{objects}")
    dist.all_reduce(torch.full((4,), -1, dtype=torch.int32))  # the bits of a NaN
    check.done()


def patterns(dtype: torch.dtype, rng: np.random.Generator) -> torch.Tensor:
    """Elements of a dtype: all there are of one or two bytes, else those around the NaNs."""
    if dtype.itemsize == 1:
        return torch.arange(256, dtype=torch.uint8).view(dtype)
    if dtype.itemsize == 2:
        return torch.arange(1 << 16).to(torch.uint16).view(dtype)
    part = torch.float32 if dtype in (torch.float32, torch.complex64) else torch.float64
    kinds = torch.tensor(
        [NAN, -NAN, float("inf"), -float("inf"), 0.0, -0.0, torch.finfo(part).max], dtype=part
    )
    whole = torch.int32 if part == torch.float32 else torch.int64
    near = torch.cat([kinds.view(whole) + step for step in (-1, 0, 1)]).view(part)
    values = torch.cat([near, torch.from_numpy(rng.standard_normal(1001)).to(part)])
    return values if dtype == part else torch.complex(values, values.flip(0))


@pytest.mark.parametrize("dtype", [*FLOATS, *COMPLEX, *FLOAT8], ids=str)
def test_what_a_nan_is(dtype, rng, count):
    """Bit for bit as torch says, at every address and in every length."""
    check, (rank, size) = Check(), here()
    every = patterns(dtype, rng)
    nans = every.isnan() if dtype not in FLOAT8 else every.float().isnan()
    good, bad = every[~nans], every[nans]
    check.that(error_of(lambda: gathered(good)) is None, "no NaN")
    for number in range(20):
        n = int(rng.integers(1, 20_000))
        at = int(rng.integers(n))
        pick = torch.from_numpy(rng.integers(0, len(good), n + 1))
        x = good.view(torch.uint8).view(len(good), -1)[pick].reshape(-1).view(dtype)[1:]
        nan = bad[int(rng.integers(len(bad)))]
        x.view(torch.uint8)[at * dtype.itemsize : (at + 1) * dtype.itemsize] = nan.reshape(1).view(
            torch.uint8
        )
        odd = number % size
        mine = x if rank == odd else good
        wrong = told(error_of(lambda mine=mine: gathered(mine)), (odd,), f"element {at} of {n} in")
        check.that(not wrong, f"{n} elements: {wrong}")
    count(20)
    check.done()


def gathered(x: torch.Tensor) -> None:
    """Send a tensor of any length to rank 0."""
    rank, size = here()
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(size)]
    dist.all_gather(lengths, torch.tensor([x.numel()]))
    places = [torch.empty(int(n), dtype=x.dtype) for n in lengths] if rank == 0 else None
    dist.gather(x, places, 0)


def test_arrays_and_orders():
    check, (rank, size) = Check(), here()
    bad = size - 1
    fill = NAN if rank == bad else 1.0
    array = np.ones((5, 4), np.float32)
    array[2, 1] = fill
    wrong = told(error_of(lambda: dist.all_reduce(array)), (bad,), "element 9 of 20 in all_reduce")
    check.that(not wrong, wrong)
    turned = torch.ones(4, 5).t()
    turned[1, 2] = fill
    wrong = told(error_of(lambda: dist.all_reduce(turned)), (bad,), "element 11 of 20 in the order")
    check.that(not wrong, wrong)
    lists = [torch.ones(3), torch.ones(2), torch.tensor([1.0, fill])]
    wrong = told(
        error_of(lambda: dist.all_reduce_coalesced(lists)),
        (bad,),
        "element 1 of 2, in tensor 2 of its list",
    )
    check.that(not wrong, wrong)
    shared = dist.full((1000,), 1.0, symmetric=True)
    shared[7] = fill
    wrong = told(error_of(lambda: dist.all_reduce(shared)), (bad,), "element 7 of 1000")
    check.that(not wrong, wrong)
    shared.fill_(1.0)
    dist.all_reduce(shared)
    check.that(bool((shared == size).all()), f"{shared}")
    check.done()


def test_all_ranks_have_one():
    check, (rank, _) = Check(), here()
    x = torch.ones(4)
    x[rank % 4] = NAN
    wrong = told(error_of(lambda: dist.all_reduce(x)), (rank,), f"^NaN at element {rank % 4} of 4")
    check.that(not wrong, wrong)
    check.that(works(), "afterwards")
    check.done()


@pytest.mark.mpi(min_size=2)
def test_only_some_ranks_look():
    check, (rank, _) = Check(), here()
    _engine.look_for_nans(rank == 0)
    for n in SIZES:
        x = torch.full((n,), NAN if rank == 0 else 1.0)
        wrong = told(error_of(lambda x=x: dist.all_reduce(x)), (0,), "element 0")
        check.that(not wrong, wrong)
        x = torch.full((n,), NAN if rank == 1 else 1.0)
        error = error_of(lambda x=x: dist.all_reduce(x))
        check.that(error is None and bool(x.isnan().all()), f"{error}, {x}")
    check.done()


@pytest.mark.mpi(min_size=2)
def test_a_rank_that_comes_late_to_many_refusals():
    """The others wait for no one, and do not keep all their reasons."""
    check, (rank, _) = Check(), here()
    x = torch.tensor([NAN if rank == 0 else 1.0])
    for group in (None, between_nodes()):
        for odd in (False, True):  # some of the arguments are wrong, too
            dist.barrier(group)
            time.sleep(0.3 * (rank != 0))
            for k in range(25):
                bad = odd and k == 13 and rank == 0
                error = error_of(lambda g=group, b=bad: dist.all_reduce("" if b else x, group=g))
                right = (dist.DistNaNError, dist.DistMismatchError) if odd else dist.DistNaNError
                check.that(bad or isinstance(error, right), f"call {k}: {error!r}")
        if group is not None:
            dist.destroy_process_group(group)
    check.that(works(), "afterwards")
    check.done()


def test_what_an_operation_before_writes_is_looked_at_when_it_is_there():
    check, (rank, size) = Check(), here()
    x = torch.full((200_000 * size,), NAN)
    works_ = [
        dist.all_gather_single(x, torch.ones(200_000), async_op=True),
        dist.all_reduce(x, async_op=True),
    ]
    error = error_of(lambda: works_)
    check.that(error is None and bool((x == size).all()), f"{error}, {x}")
    y = torch.full((3,), float("inf") * (-1) ** rank)
    works_ = [dist.all_reduce(y, async_op=True), dist.all_reduce(y, async_op=True)]
    error = error_of(lambda: works_)
    if size > 1:
        wrong = told(error, (rank,), "^NaN at element 0")
        check.that(not wrong, wrong)
    check.that(works(), "afterwards")
    check.done()


@pytest.mark.mpi(min_size=2)
def test_without_the_entry_check_the_operation_is_carried_out():
    check, (rank, size) = Check(), here()
    group = dist.new_group(pg_options=dist.MPIOptions(check="off"))
    for n in SIZES:
        x = torch.ones(n)
        x[n - 1] = NAN if rank == 1 else 1.0
        error = error_of(lambda x=x: dist.all_reduce(x, group=group))
        text = rf"element {n - 1} of {n} in .*carried out"
        check.that(bool(re.search(text, str(error))) == (rank == 1), f"{error}")
        check.that(isinstance(error, dist.DistNaNError) == (rank == 1), f"{error}")
        check.that(bool(x[n - 1].isnan()) and x[0].item() == size, f"{x}")
    dist.destroy_process_group(group)
    check.done()


def test_the_variable(monkeypatch, no_world):
    check = Check()
    for value, expected in (("1", True), ("0", False), (None, False)):
        said = start_with(monkeypatch, HPCDIST_NAN_CHECK=value)
        error = error_of(lambda: dist.all_reduce(torch.tensor([NAN])))
        check.that(
            not said and isinstance(error, dist.DistNaNError) == expected, f"{value}: {said}"
        )
        check.done()
        dist.destroy_process_group()
