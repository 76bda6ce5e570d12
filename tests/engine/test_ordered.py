"""HPCDIST_DETERMINISTIC=layout: the same bits wherever the ranks are."""

from __future__ import annotations

import itertools

import pytest
import torch
from cases import FLOATS, Check, draw, finish, here, pairs, reference
from worlds import LAYOUTS, layouts, start_with, true_place

import hpcdist as dist
from hpcdist.testing import parallel_assert

pytestmark = [pytest.mark.ranks, pytest.mark.mpi(min_size=3)]

#: A few bytes, letters of some lengths, through memory or MPI, in several pieces.
SIZES = (1, 7, 300, 1_200, 5_003, 70_001)
LONG = 1_200_007
SUMS = [(name, op, dtype) for name, op, dtype in pairs()
        if dtype in FLOATS and name not in ("MIN", "MAX")]  # fmt: skip


def places() -> dict[str, dict[str, str | None]]:
    """Variables by which the same ranks are in different places, or reach each other otherwise."""
    size = true_place()[1]
    nodes = zip(LAYOUTS, layouts(size), strict=True)
    return {
        "one node": {},
        **{name: {"HPCDIST_NODES": value} for name, value in nodes},
        "apart": {"HPCDIST_CHECK_TRANSPORT": "mpi"},
        "one node, without its memory": {"HPCDIST_NODE_MEMORY": "0"},
        "two levels": {"HPCDIST_NODES": "2", "HPCDIST_TWO_LEVEL": "on"},
        "level fast": {"HPCDIST_NODES": "2", "HPCDIST_CHECK": "fast"},
        "without a check": {"HPCDIST_NODES": "2", "HPCDIST_CHECK": "off"},
    }


@pytest.fixture
def world(no_world, monkeypatch):
    """Start the default group in such a place, with the setting; after an error without."""

    def begin(place: dict[str, str | None], deterministic: str | None = "layout") -> str:
        if dist.is_initialized():
            dist.destroy_process_group()
        plain = {"HPCDIST_NODES": None, "HPCDIST_CHECK_TRANSPORT": None}
        variables = plain | place | {"HPCDIST_DETERMINISTIC": deterministic}
        return start_with(monkeypatch, **variables)

    yield begin
    dist.destroy_process_group()


def fold(parts: list[torch.Tensor]) -> torch.Tensor:
    """Add in the order of the ranks, with a rounding after each."""
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


def all_reduce(parts, op, async_op, in_place) -> torch.Tensor:
    tensor = parts[here()[0]].clone()
    finish(dist.all_reduce(tensor, op, async_op=async_op), async_op)
    return tensor


def reduce(parts, op, async_op, in_place) -> torch.Tensor:
    rank, size = here()
    tensor, root = parts[rank].clone(), size - 1
    finish(dist.reduce(tensor, root, op, async_op=async_op), async_op)
    return tensor if rank == root else tensor[:0]


def reduce_scatter_tensor(parts, op, async_op, in_place) -> torch.Tensor:
    rank, size = here()
    n = len(parts[0]) // size
    whole = parts[rank][: n * size].clone()
    out = whole[rank * n :][:n] if in_place else torch.empty_like(whole[:n])
    finish(dist.reduce_scatter_tensor(out, whole, op, async_op=async_op), async_op)
    return out


def reduce_scatter(parts, op, async_op, in_place) -> torch.Tensor:
    """Reduce blocks of different sizes, one of them empty."""
    rank, size = here()
    unit = len(parts[0]) // (size * size) + 1
    blocks = [parts[rank][: q * unit].clone() for q in range(size)]
    out = blocks[rank] if in_place else torch.empty_like(blocks[rank])
    finish(dist.reduce_scatter(out, blocks, op, async_op=async_op), async_op)
    return out


CALLS = all_reduce, reduce, reduce_scatter_tensor, reduce_scatter


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_the_bits_do_not_depend_on_the_places(rng, world, call):
    check, size = Check(), true_place()[1]
    cases = [(*each, n) for each in SUMS for n in SIZES]
    cases += [(*each, LONG) for each in SUMS if each[2] in (torch.bfloat16, torch.float32)]
    inputs = [[draw(rng, dtype, n) for _ in range(size)] for _, _, dtype, n in cases]
    first: list[torch.Tensor] = []
    turns = itertools.cycle([(False, False), (True, True), (False, True)])
    for where, variables in places().items():
        check.that(world(variables) == "", where)
        for i, ((name, op, dtype, n), parts) in enumerate(zip(cases, inputs, strict=True)):
            label = f"{where}: {name} {dtype} n={n}"
            got = call(parts, op, *next(turns))
            if where == "one node":
                first.append(got.clone())
            check.that(torch.equal(got.view(torch.uint8), first[i].view(torch.uint8)), label)
            if call is all_reduce and name == "SUM":
                check.that(torch.equal(got, fold(parts)), f"{label}: in the order of the ranks")
            elif call is all_reduce:
                check.near(got, *reference(name, parts), label)
    check.done()


def test_it_is_not_so_without_the_setting(rng, world):
    """Otherwise the test above shows nothing."""
    size = true_place()[1]
    parts = [draw(rng, torch.float32, 3_001) for _ in range(size)]
    found = []
    for variables in places().values():
        parallel_assert(world(variables, None) == "")
        found.append(all_reduce(parts, dist.ReduceOp.SUM, False, False))
    parallel_assert(any(not torch.equal(one, found[0]) for one in found))


def test_groups_inherit_it(rng, world):
    rank, size = true_place()
    parts = [draw(rng, torch.float32, 5_003) for _ in range(size)]
    parallel_assert(world({"HPCDIST_NODES": layouts(size)[1]}) == "")
    backwards = dist.new_group(range(size - 1, -1, -1), sort_ranks=False)
    tensor = parts[rank].clone()
    dist.all_reduce(tensor, group=backwards)
    parallel_assert(torch.equal(tensor, fold(parts[::-1])))


def test_another_word_is_refused_by_all(world):
    said = world({}, "always")
    parallel_assert("HPCDIST_DETERMINISTIC" in said and "off, layout" in said, said)


def test_ranks_that_disagree(world):
    rank, size = true_place()
    said = world({"HPCDIST_NODES": "2"}, "layout" if rank == size - 1 else "off")
    want = f"HPCDIST_DETERMINISTIC is 'layout' on rank {size - 1}, and not on rank 0"
    parallel_assert(want in said, said)
