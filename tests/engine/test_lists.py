"""Lists of short tensors, which a reduce_scatter moves as one block, and those too long for it."""

import pytest
import torch
from cases import MOVED, OPS, Check, draw, here, pairs, poison, reference
from forms import all_gather, all_gather_coalesced, reduce_scatter, reduce_scatter_tensor
from mpis import OPEN_MPI_LIMITS
from worlds import group_for

import hpcdist as dist

pytestmark = pytest.mark.ranks

#: Bytes of all tensors of a list that goes as one block, at most.
PACKED = 64 << 10


def sizes(itemsize: int) -> list[int]:
    """Elements of one tensor: too long to travel with the check, and around the limit."""
    most = PACKED // itemsize // here()[1]
    return [most // 8, most, most + 1]


@pytest.fixture(params=["node", "nodes"])
def group(request):
    with group_for(request.param == "nodes", seconds=20) as made:
        yield made


@pytest.mark.parametrize("form", [all_gather, all_gather_coalesced], ids=lambda f: f.__name__)
def test_gathered_lists_of_every_dtype(rng, group, form):
    check = Check()
    for i, dtype in enumerate(MOVED):
        form(rng, check, dtype, sizes(dtype.itemsize)[i % 3], i % 2 == 1, group)
    check.done()


@pytest.mark.parametrize("form", [reduce_scatter, reduce_scatter_tensor], ids=lambda f: f.__name__)
def test_reduced_lists_of_every_dtype(rng, group, form):
    """The tensor form as well: a factor before the sum makes it a block of its own."""
    check = Check()
    for i, (name, _, dtype) in enumerate(pairs()):
        form(rng, check, name, dtype, sizes(dtype.itemsize)[i % 3], i % 2 == 1, group)
    check.done()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("group", ["nodes"], indirect=True)
def test_which_lists_are_reduced_as_one_block(group):
    """Between nodes: Open MPI's from four ranks on, those of others from two."""
    check, (_, size) = Check(), here()
    most = PACKED // 4 // size
    packs = size >= (4 if OPEN_MPI_LIMITS else 2)
    for n in (most - 1, most, most + 1):
        before = group.carrier.packed
        dist.reduce_scatter(torch.ones(n), [torch.ones(n) for _ in range(size)], group=group)
        blocks = group.carrier.packed - before
        check.that(blocks == (packs and n <= most), f"{n} of {most}: {blocks}")
    check.done()


def lists(tensors: list[torch.Tensor]) -> dict[str, list[torch.Tensor]]:
    """The same tensors as parts of one, in order and in reverse, and apart."""
    n = len(tensors[0])
    return {
        "parts": list(torch.cat(tensors).split(n)),
        "reversed": list(torch.cat(tensors[::-1]).split(n))[::-1],
        "apart": [t.clone() for t in tensors],
    }


@pytest.mark.parametrize("mixed", [False, True], ids=["alike", "mixed"])
def test_where_tensors_lie_changes_nothing(rng, group, mixed):
    """Parts of one tensor need no copy, and other ranks may have theirs elsewhere."""
    check, (rank, size) = Check(), here()
    names = ["parts", "reversed", "apart"]
    for n in sizes(4):
        for i in range(len(names)):
            where = names[(i + rank * mixed) % len(names)]
            blocks = [[draw(rng, torch.float32, n) for _ in range(size)] for _ in range(size)]
            outs = lists([poison(torch.float32, n) for _ in range(size)])[where]
            dist.all_gather(outs, blocks[rank][0], group)
            for r in range(size):
                check.equal(outs[r], blocks[r][0], f"all_gather n={n}, {where}, from {r}")
            given = lists(blocks[rank])[where]
            out = poison(torch.float32, n)
            dist.reduce_scatter(out, given, group=group)
            want = reference("SUM", [each[rank] for each in blocks])
            check.near(out, *want, f"reduce_scatter n={n}, {where}")
            for r in range(size):
                check.equal(given[r], blocks[rank][r], f"reduce_scatter n={n}, {where}, input {r}")
    check.done()


@pytest.mark.parametrize("name", ["SUM", "AVG"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_an_output_may_lie_in_any_input(rng, group, name, dtype):
    check, (rank, size) = Check(), here()
    for n in sizes(dtype.itemsize):
        for place in range(size):
            blocks = [[draw(rng, dtype, n) for _ in range(size)] for _ in range(size)]
            want = reference(name, [each[rank] for each in blocks])
            given = list(torch.cat(blocks[rank]).split(n))
            dist.reduce_scatter(given[place], given, OPS[name], group)
            check.near(given[place], *want, f"{name} {dtype} n={n}, output in {place}")
    check.done()
