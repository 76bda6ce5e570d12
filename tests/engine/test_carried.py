"""Collectives of a few bytes, which travel with the entry check: through memory, or as letters."""

import pytest
import torch
from carried import (
    infinities_and_nans,
    outputs_that_late_ranks_leave,
    stopped_anywhere,
    sums_in_the_order_of_doubling,
)
from cases import MOVED, Check, finish, here, pairs, poison
from forms import MOVES, REDUCTIONS
from worlds import group_for

import hpcdist as dist
from hpcdist.testing import parallel_raises

pytestmark = pytest.mark.ranks

#: Bytes of a contribution that travel in a rank's slot, and with the check at all on a node; and
#: between nodes, of what all ranks share or have together.
SMALL, CARRIED, LETTER = 8, 1024, 3840
SYNC = pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])


def sizes(itemsize: int) -> list[int]:
    """Elements around both limits, where a contribution is one part and where it is all parts."""
    ranks = here()[1]
    around = {1}
    for limit in (SMALL, CARRIED, LETTER):
        for parts in {1, ranks, ranks**2}:
            at = limit // itemsize // parts
            around |= {at, at + 1}
    return sorted(around - {0})


@pytest.fixture(params=["memory", "letters"])
def group(request):
    with group_for(request.param == "letters", seconds=10) as made:
        yield made


@SYNC
@pytest.mark.parametrize("form", MOVES, ids=lambda form: form.__name__)
def test_moves_of_every_dtype_around_the_limits(rng, group, form, async_op):
    check = Check()
    for i, dtype in enumerate(MOVED[::4] if async_op else MOVED):
        for n in sizes(dtype.itemsize)[i % 3 :: 3]:
            form(rng, check, dtype, n, async_op, group)
    check.done()


@SYNC
@pytest.mark.parametrize("form", REDUCTIONS, ids=lambda form: form.__name__)
def test_reductions_of_every_dtype_around_the_limits(rng, group, form, async_op):
    check = Check()
    for i, (name, _, dtype) in enumerate(pairs()[:: 7 if async_op else 1]):
        for n in sizes(dtype.itemsize)[i % 3 :: 3]:
            form(rng, check, name, dtype, n, async_op, group)
    check.done()


@pytest.mark.one_node
@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("group", ["memory"], indirect=True)
def test_what_travels_through_memory(group):
    """None of the other tests sees which way data has taken."""
    check = Check()
    for nbytes, travels in ((1, 1), (SMALL, 1), (SMALL + 1, 1), (CARRIED, 1), (CARRIED + 1, 0)):
        for call in (
            lambda t: dist.all_reduce(t, group=group),
            lambda t: dist.broadcast(t, 0, group),
            lambda t: dist.all_gather_into_tensor(torch.cat([t] * here()[1]), t, group),
        ):
            before = group.carrier.carried
            call(torch.ones(nbytes, dtype=torch.uint8))
            check.that(group.carrier.carried - before == travels, f"{nbytes} bytes")
    check.done()


@pytest.mark.parametrize("level", [0, 2], ids=["off", "full"])
def test_the_other_check_levels(rng, group, level):
    check = Check()
    dist.barrier(group)
    group.carrier.check = level
    for n in (1, 16, CARRIED // 4 + 1, LETTER // 4 + 1):
        for form in MOVES:
            form(rng, check, torch.float32, n, False, group)
        for form in REDUCTIONS:
            form(rng, check, "SUM", torch.float32, n, False, group)
    check.done()


def test_infinities_and_nans(group):
    infinities_and_nans(group, (1, 5, 64))


def test_other_orders_of_elements(rng, group):
    """Dense, not C-contiguous: elements travel in the order in which they lie."""
    check, (rank, size) = Check(), here()
    parts = [torch.from_numpy(rng.standard_normal((4, 6))).t() for _ in range(size)]
    out = torch.empty(4, 6, dtype=torch.float64).t()
    out.copy_(parts[rank])
    dist.broadcast(out, size - 1, group)
    check.equal(out, parts[-1], "broadcast")
    outs = [torch.empty(4, 6, dtype=torch.float64).t() for _ in range(size)]
    dist.all_gather(outs, parts[rank], group)
    for r in range(size):
        check.equal(outs[r], parts[r], f"all_gather from {r}")
    check.done()


def test_an_input_may_lie_in_any_output(rng, group):
    check, (rank, size) = Check(), here()
    parts = [torch.from_numpy(rng.integers(0, 99, 5)) for _ in range(size)]
    for place in range(size):
        outs = [poison(torch.int64, 5) for _ in range(size)]
        outs[place].copy_(parts[rank])
        dist.all_gather(outs, outs[place], group)
        for r in range(size):
            check.equal(outs[r], parts[r], f"all_gather, input in {place}, from {r}")
        given = [p.clone() for p in parts]
        mine = given[place] if rank == 0 else poison(torch.int64, 5)
        dist.scatter(mine, given if rank == 0 else None, 0, group)
        check.equal(mine, parts[rank], f"scatter, output in {place}")
    check.done()


@pytest.mark.mpi(min_size=2)
def test_sizes_that_do_not_fit_change_nothing(group):
    """Pair by pair: all ranks raise, and no output is touched."""
    check, (rank, size) = Check(), here()
    outs = [poison(torch.int64, 2) for _ in range(size)]
    sent = [torch.zeros(3 if (rank, r) == (0, size - 1) else 2).long() for r in range(size)]
    with parallel_raises(dist.DistMismatchError):
        dist.all_to_all(outs, sent, group)
    for out in outs:
        check.equal(out, poison(torch.int64, 2), "all_to_all")
    mine = poison(torch.int64, 4 if rank == size - 1 else 3)
    with parallel_raises(dist.DistMismatchError):
        dist.scatter(mine, [torch.zeros(3).long()] * size if rank == 0 else None, 0, group)
    check.equal(mine, poison(torch.int64, mine.numel()), "scatter")
    out = poison(torch.float32, 2 if rank else 3)
    with parallel_raises(dist.DistMismatchError):
        dist.broadcast(out, 0, group)
    check.equal(out, poison(torch.float32, out.numel()), "broadcast")
    check.done()


@pytest.mark.mpi(min_size=2)
def test_a_late_rank_leaves_outputs_untouched_and_all_can_retry(rng, group):
    outputs_that_late_ranks_leave(rng, group, 2, [here()[1] - 1])


@pytest.mark.mpi(min_size=2)
def test_ranks_that_are_stopped_anywhere(rng, group):
    """SIGSTOP and SIGCONT of one rank, again and again, under calls of all kinds."""
    check = Check()
    with stopped_anywhere():
        for turn in range(6):
            for form in MOVES:
                form(rng, check, torch.int32, 1 + 5 * turn, turn % 2 == 1, group=group)
            for form in REDUCTIONS:
                form(rng, check, "SUM", torch.int32, 1 + 5 * turn, turn % 2 == 1, group=group)
    check.done()


@SYNC
def test_a_rank_that_flushes_denormals_gets_the_same_sums(group, async_op):
    """The mode belongs to a thread; where data is carried, any thread of any rank may add."""
    check, (rank, size) = Check(), here()
    tiny = {torch.float32: 1e-40, torch.float64: 1e-310, torch.bfloat16: 1e-39}
    for dtype, value in tiny.items():
        for n in (1, 9, 2000, 100_000):
            for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
                want = torch.full((n,), value, dtype=dtype)
                if op is dist.ReduceOp.SUM:
                    want = sum([want] * (size - 1), want)
                tensor = torch.full((n,), value, dtype=dtype)
                try:
                    torch.set_flush_denormal(rank == 0)
                    finish(dist.all_reduce(tensor, op, group, async_op), async_op)
                    kept = (torch.tensor(1e-300, dtype=torch.float64) * 1e-10).item() == 0
                finally:
                    torch.set_flush_denormal(False)
                check.that(kept == (rank == 0), f"{dtype} {n}: the mode of rank {rank} changed")
                bits = torch.int64 if dtype is torch.float64 else torch.int32
                bits = torch.int16 if dtype is torch.bfloat16 else bits
                if op is dist.ReduceOp.SUM or size == 2:
                    same = torch.equal(tensor.view(bits), want.view(bits))
                    check.that(same, f"{dtype} {n} {op}: {tensor[:3]}")
    check.done()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("group", ["letters"], indirect=True)
def test_ranks_of_which_one_sends_no_letter(rng, group):
    """The memory of its tensors is a device's, as far as it knows; the others cannot know that."""
    check, (rank, size) = Check(), here()
    group.carrier.on_device = rank == size - 1
    for n in (1, CARRIED // 8):
        for value in (3, 4):
            tensor = torch.full((n,), value + rank)
            dist.all_reduce(tensor, group=group)
            want = torch.full((n,), size * value + sum(range(size)))
            check.equal(tensor, want, f"n={n}")
    check.done()


@pytest.mark.mpi(min_size=3)
@pytest.mark.parametrize("group", ["letters"], indirect=True)
def test_letters_are_added_in_the_order_of_doubling(rng, group):
    """Also where the ranks write to all others at once: neither form changes a bit."""
    sums_in_the_order_of_doubling(rng, group, (2, CARRIED // 8, CARRIED // 4))
