"""HPCDIST_TWO_LEVEL: operations between nodes that go through the memory of each node first."""

import contextlib
import itertools

import pytest
import torch
from block_calls import (
    OPERATIONS,
    all_gather,
    all_gather_into_tensor,
    broadcast,
    reduce,
    reduce_scatter,
    reduce_scatter_tensor,
)  # fmt: skip
from cases import MOVED, Check, draw, finish, here, pairs, reduce_at_odd_address, reference
from lateness import once_others_have_ended
from mpis import OPEN_MPI_LIMITS
from resources import held
from worlds import LAYOUTS, layouts, start_with, true_place, works

import hpcdist as dist
from hpcdist.testing import parallel_assert

pytestmark = [pytest.mark.ranks, pytest.mark.mpi(min_size=3)]

#: Of worlds.layouts().
each_layout = pytest.mark.parametrize("which", range(len(LAYOUTS)), ids=LAYOUTS)
#: Bytes from which tensors go that way, and of a piece.
LEAST, PIECE = 32 << 10, 256 << 10
LONG = 100_003  # elements
#: Bytes of memory with which a piece is shorter: 8 to 16 KiB.
LITTLE = 112 << 10


@pytest.fixture
def world(no_world, monkeypatch):
    """Start the default group on such nodes, with the setting; after an error without both."""

    def begin(nodes: str, two_level: str = "on") -> str:
        return start_with(monkeypatch, HPCDIST_NODES=nodes, HPCDIST_TWO_LEVEL=two_level)

    yield begin
    dist.destroy_process_group()


def shared(group=None) -> bool:
    return (group or dist.group.WORLD).carrier.node_memory > 0


def right(rng, group=None) -> bool:
    """Whether a long all-reduce over all ranks gives what it must."""
    rank, size = here()
    parts = [draw(rng, torch.float32, LONG) for _ in range(size)]
    tensor = parts[rank].clone()
    dist.all_reduce(tensor, group=group)
    want, bound = reference("SUM", parts)
    return bool(((tensor.double() - want).abs() <= bound).all())


@each_layout
def test_every_dtype_and_operation(rng, world, which):
    check, (rank, size) = Check(), true_place()
    parallel_assert(world(layouts(size)[which]) == "")
    for (name, op, dtype), async_op in zip(pairs(), itertools.cycle([False, True])):
        least = LEAST // dtype.itemsize
        for n in (least - 1, least, 3 * least + 5):
            label = f"{name} {dtype} n={n}"
            parts = [draw(rng, dtype, n) for _ in range(size)]
            tensor = parts[rank].clone()
            finish(dist.all_reduce(tensor, op, async_op=async_op), async_op)
            check.near(tensor, *reference(name, parts), label)
            check.everywhere(tensor, label)
    check.that(shared(), "it has memory")
    check.done()


ONE_TENSOR = broadcast, reduce
BLOCKS = all_gather_into_tensor, all_gather, reduce_scatter_tensor, reduce_scatter
LISTS = all_gather, reduce_scatter
REDUCTIONS = reduce, reduce_scatter_tensor, reduce_scatter


def sizes_of(call, dtype: torch.dtype) -> tuple[int, ...]:
    """Elements of a block, about the least size; of several pieces, the last of them short."""
    blocks = here()[1] if call in BLOCKS else 1
    least = -(-LEAST // dtype.itemsize // blocks)
    return least - 1, least, 3 * least + 5


@each_layout
@pytest.mark.parametrize("call", [broadcast, all_gather_into_tensor, all_gather],
                         ids=lambda call: call.__name__)  # fmt: skip
def test_every_dtype_that_is_moved(rng, world, call, which):
    check, (_, size) = Check(), true_place()
    parallel_assert(world(layouts(size)[which]) == "")
    dist.group.WORLD.carrier.node_limit = LITTLE
    listed = {"even": True} if call in LISTS else {}
    for dtype, async_op in zip(MOVED, itertools.cycle([False, True])):
        for n in sizes_of(call, dtype):
            call(check, rng, None, dtype, n, async_op, name=f"{dtype} n={n}", **listed)
    check.that(shared(), "it has memory")
    check.done()


@each_layout
@pytest.mark.parametrize("call", REDUCTIONS, ids=lambda call: call.__name__)
def test_every_reduction(rng, world, call, which):
    check, (_, size) = Check(), true_place()
    parallel_assert(world(layouts(size)[which]) == "")
    dist.group.WORLD.carrier.node_limit = LITTLE
    listed = {"even": True} if call in LISTS else {}
    for (op, _, dtype), async_op in zip(pairs(), itertools.cycle([False, True, True])):
        n = sizes_of(call, dtype)[1 + async_op]
        call(check, rng, None, dtype, n, async_op, op, f"{op} {dtype} n={n}", **listed)
    check.that(shared(), "it has memory")
    check.done()


@each_layout
def test_from_and_to_each_rank(rng, world, which):
    check, (_, size) = Check(), true_place()
    parallel_assert(world(layouts(size)[which]) == "")
    for root, call in itertools.product(range(size), ONE_TENSOR):
        call(check, rng, None, torch.float32, 5 * LONG, root == 1, name=call.__name__, root=root)
    check.done()


@pytest.mark.parametrize("which", [0, 1], ids=["blocks", "in turn"])
def test_tensors_that_lie_in_others(rng, world, which):
    """Inputs in any output, outputs in the own input, one tensor and lists."""
    check, (rank, size) = Check(), true_place()
    parallel_assert(world(layouts(size)[which]) == "")
    dist.group.WORLD.carrier.node_limit = LITTLE
    for n in (20_001, LONG):
        for at in (rank * n, (rank + 1) % size * n, n // 2):
            all_gather_into_tensor(check, rng, None, torch.float32, n, False, f"at {at}", at)
        for at in range(size):
            all_gather(check, rng, None, torch.int16, n, False, f"in {at}", at, even=True)
        for op in ("SUM", "PREMUL_SUM", "AVG"):
            reduce_scatter_tensor(check, rng, None, torch.float16, n, True, op, op, own=True)
            reduce_scatter(check, rng, None, torch.float16, n, True, op, op, own=True, even=True)
    check.done()


@pytest.mark.parametrize("name, dtype", [
    ("SUM", torch.float32), ("AVG", torch.float16), ("MAX", torch.int8),
    ("PREMUL_SUM", torch.complex128),
])  # fmt: skip
def test_around_whole_pieces(rng, world, name, dtype):
    check = Check()
    parallel_assert(world("2") == "")
    piece = PIECE // dtype.itemsize
    small = draw(rng, dtype, 10_007)
    for pieces, more in itertools.product((1, 2, 3, 7), (-1, 0, 1)):
        n = pieces * piece + more
        reduce_at_odd_address(check, name, small, n)
    check.done()


def test_groups_lists_and_many_in_flight(rng, world):
    """Groups of some ranks of each node, of one rank of each, of one node; lists of tensors."""
    check, (rank, size) = Check(), true_place()
    parallel_assert(world(",".join(str(r % 2) for r in range(size))) == "")
    chosen = [list(range(size)), [2, 1, 0], [0, 1], list(range(0, size, 2))]
    groups = [dist.new_group(ranks) for ranks in chosen]
    jobs = []
    for turn, (group, ranks) in itertools.product(range(9), zip(groups, chosen, strict=True)):
        parts = [draw(rng, torch.float32, (LONG, 1001, 20_000)[turn % 3]) for _ in ranks]
        if rank in ranks:
            tensor = parts[ranks.index(rank)].clone()
            work = dist.all_reduce(tensor, group=group, async_op=True)
            jobs.append((work, tensor, parts, f"turn {turn} of {ranks}"))
    for work, tensor, parts, label in jobs:
        work.wait()
        check.near(tensor, *reference("SUM", parts), label)
    listed = [[draw(rng, torch.float32, n) for n in (3, LONG, 0, 1001)] for _ in range(size)]
    mine = [t.clone() for t in listed[rank]]
    dist.all_reduce_coalesced(mine)
    for i, tensor in enumerate(mine):
        check.near(tensor, *reference("SUM", [each[i] for each in listed]), f"of a list, {i}")
    if rank in (0, 1):
        check.that(not shared(groups[2]), "a rank of each node needs no memory")
    check.done()
    for group, ranks in zip(groups, chosen, strict=True):
        if rank in ranks:
            dist.destroy_process_group(group)


@each_layout
def test_after_checks_that_were_given_up(rng, world, which):
    """Their rounds and the first rail have one communicator."""
    check, (_, size) = Check(), true_place()
    parallel_assert(world(layouts(size)[which]) == "")
    group = dist.new_group()
    for late in range(size):
        group.carrier.timeout = 0.3
        dist.barrier()
        with contextlib.suppress(dist.DistTimeoutError), once_others_have_ended(late):
            dist.all_reduce(torch.ones(3), group=group)
            check.that(False, f"rank {late} was late")
        group.carrier.timeout = 20
        dist.barrier()
        for call in (*ONE_TENSOR, *BLOCKS):
            call(check, rng, group, torch.float32, LONG, False, name=f"{call.__name__}, {late}")
    check.that(shared(group), "it has memory")
    check.done()
    dist.destroy_process_group(group)


@each_layout
def test_any_order_in_several_groups(rng, world, which):
    """The parts of the slots are used in turn by all operations."""
    check, (_, size) = Check(), true_place()
    parallel_assert(world(layouts(size)[which]) == "")
    groups = [dist.new_group(), dist.new_group()]
    for group in groups:
        group.carrier.node_limit = LITTLE
    for turn in range(100):
        group = groups[int(rng.integers(2))]
        n = int(rng.choice([1, 3000, 9000, 20_000, LONG]))
        call = (*ONE_TENSOR, *BLOCKS, *ONE_TENSOR, *BLOCKS, *OPERATIONS)[int(rng.integers(26))]
        listed = {"even": bool(rng.integers(2))} if call in LISTS else {}
        label = f"{call.__name__}, turn {turn}, n={n}"
        call(check, rng, group, torch.float32, n, bool(rng.integers(2)), name=label, **listed)
        if turn % 3 == 0:
            parallel_assert(right(rng, group), label)
    check.done()
    for group in groups:
        dist.destroy_process_group(group)


def test_many_in_flight(rng, world):
    """No rank waits between operations, and each rank's speed differs."""
    check, (rank, size) = Check(), true_place()
    parallel_assert(world("2") == "")
    dist.group.WORLD.carrier.node_limit = LITTLE
    whole = [draw(rng, torch.int32, 5000 * size) for _ in range(size)]
    total = sum(whole)
    made = []
    for turn, kind in itertools.product(range(30), range(5)):
        mine, out = whole[rank].clone(), torch.full((5000 * size,), -1, dtype=torch.int32)
        own, root = slice(5000 * rank, 5000 * (rank + 1)), turn % size
        if kind == 0:
            want, work = total, dist.all_reduce(mine, async_op=True)
        elif kind == 1:
            want = total if rank == root else whole[rank]
            work = dist.reduce(mine, root, async_op=True)
        elif kind == 2:
            want, work = whole[root], dist.broadcast(mine, root, async_op=True)
        elif kind == 3:
            want = torch.cat([each[5000 * r : 5000 * (r + 1)] for r, each in enumerate(whole)])
            work, mine = dist.all_gather_into_tensor(out, mine[own], async_op=True), out
        else:
            want, out = total[own], out[own]
            work, mine = dist.reduce_scatter_tensor(out, mine, async_op=True), out
        made.append((work, mine, want, f"kind {kind}, turn {turn}"))
    for work, got, want, label in made:
        work.wait()
        check.equal(got, want, label)
    check.that(shared(), "it has memory")
    check.done()


def test_the_same_bits_from_run_to_run(rng, world):
    rank, size = true_place()
    parallel_assert(world("2") == "")
    parts = [draw(rng, torch.float32, LONG) for _ in range(size)]
    first = None
    for _ in range(5):
        tensor = parts[rank].clone()
        dist.all_reduce(tensor)
        block = torch.empty(LONG // size)
        dist.reduce_scatter_tensor(block, parts[rank][: LONG // size * size].clone())
        to_one = parts[rank].clone()
        dist.reduce(to_one, size - 1)
        results = torch.cat([tensor, block, to_one])
        first = results if first is None else first
        parallel_assert(torch.equal(results, first))


@pytest.mark.parametrize("why", ["off", "one rank a node", "one node", "no memory", "none on one"])
def test_it_is_not_taken(rng, world, why):
    rank, size = true_place()
    nodes = {"one rank a node": str(size), "one node": "1"}.get(why, "2")
    parallel_assert(world(nodes, "off" if why == "off" else "on") == "")
    comm = dist.group.WORLD.carrier
    if why == "no memory" or (why == "none on one" and rank == size - 1):
        comm.node_limit = 0
    parallel_assert(right(rng))
    parallel_assert(shared() == (why == "one node"), f"{comm.node_memory} bytes")
    parallel_assert(right(rng))


def test_nothing_is_left_of_a_group(rng, world):
    rank, size = true_place()
    parallel_assert(world("2") == "")
    parallel_assert(right(rng))
    before = held()
    for _ in range(3):
        group = dist.new_group()
        parallel_assert(right(rng, group) and shared(group))
        dist.destroy_process_group(group)
    after = held()
    parallel_assert((after.mappings, after.files) == (before.mappings, before.files), str(after))
    parallel_assert(works)


#: KiB, all blocks together, from which "auto" takes them. Data of exactly 64 KiB may still travel
#: as a letter.
BY_ITSELF = {
    broadcast: 8192,
    reduce: 2048 if OPEN_MPI_LIMITS else 64,
    all_gather_into_tensor: 64,
    reduce_scatter_tensor: 8192 if OPEN_MPI_LIMITS else 256,
}


def test_by_itself_long_tensors_take_it_on_nodes_of_equal_size(rng, world):
    check, (_, size) = Check(), true_place()
    parallel_assert(world("2", "") == "")
    for call, kib in BY_ITSELF.items():
        group, blocks = dist.new_group(), size if call in BLOCKS else 1
        least = -(-(kib << 8) // blocks)
        for n, takes in ((least - 1, False), (least + (kib == 64), size % 2 == 0)):
            call(check, rng, group, torch.float32, n, False, name=f"{n} elements")
            check.that(shared(group) == takes, f"{call.__name__} of {n} elements")
        dist.destroy_process_group(group)
    check.that(right(rng), "an all-reduce")
    takes = not OPEN_MPI_LIMITS and size % 2 == 0
    check.that(shared() == takes, "an all-reduce of 400 KB")
    check.done()


def test_another_word_is_refused_by_all(world):
    said = world("2", "perhaps")
    parallel_assert("HPCDIST_TWO_LEVEL" in said and "auto, off, on" in said, said)


def test_ranks_that_disagree(world):
    rank, size = true_place()
    said = world("2", "on" if rank == size - 1 else "off")
    want = f"HPCDIST_TWO_LEVEL is 'on' on rank {size - 1}, and not on rank 0"
    parallel_assert(want in said, said)
    dist.destroy_process_group()
    said = world("2", "auto" if rank == 0 else "off")
    want = "HPCDIST_TWO_LEVEL is 'auto' on rank 0, and not on rank 1"
    parallel_assert(want in said, said)
