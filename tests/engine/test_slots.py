"""Operations that move blocks through memory that the ranks of a node share.

What they give for every dtype and size is tested with each operation in tests/collectives; the kill
in the middle of one is in test_endings.py.
"""

import os
import signal
import threading
import time

import numpy as np
import pytest
import torch
from block_calls import (
    OPERATIONS,
    all_gather,
    all_gather_into_tensor,
    all_to_all,
    broadcast,
    gather,
    gather_uneven,
    reduce,
    reduce_scatter,
    reduce_scatter_tensor,
    scatter,
)  # fmt: skip
from cases import Check, draw, finish, here, pairs, poison, reference
from worlds import one_node

import hpcdist as dist
from hpcdist.testing import parallel_assert

pytestmark = pytest.mark.ranks

#: Bytes from which a group takes the memory; the same where ranks take turns; bytes of a piece.
LEAST, TURNS, PIECE = 4 << 10, 16 << 10, 128 << 10
STREAM = 8 << 20  # bytes from which results are written past the caches
LONG = 100_003  # elements


@pytest.fixture
def group():
    made = dist.new_group()
    yield made
    dist.destroy_process_group(made)


def shared(group) -> bool:
    return group.carrier.node_memory > 0


@pytest.mark.parametrize("call", OPERATIONS, ids=lambda call: call.__name__)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.complex128], ids=str)
def test_around_the_least_size_and_whole_pieces(rng, group, call, dtype):
    check, (_, size) = Check(), here()
    blocks = 1 if call in (broadcast, reduce) else size
    whole = broadcast, reduce, all_gather, all_gather_into_tensor, gather, gather_uneven
    shares = 1 if call in whole else max(size - 1, 1)
    piece = PIECE // shares // dtype.itemsize
    least = [bytes_ // blocks // dtype.itemsize for bytes_ in (LEAST, TURNS)]
    sizes = (0, *(n + k for n in least for k in (-1, 0, 1)), piece - 1, piece, piece + 1,
             2 * piece, 3 * piece + 5)  # fmt: skip
    for i, n in enumerate(sizes):
        async_op = i % 2 == 1
        name = f"{call.__name__} {dtype} n={n} async={async_op}"
        call(check, rng, group, dtype, n, async_op, name=name)
    if one_node():  # between nodes what goes over two levels has memory
        check.that(shared(group) == (size > 1), f"memory of {group.carrier.node_memory} bytes")
    check.done()


def test_results_past_the_caches(rng, group):
    """Also such as begin and end anywhere."""
    check, (_, size) = Check(), here()
    for call in (broadcast, all_gather, all_gather_into_tensor, all_to_all, reduce_scatter_tensor):
        n = STREAM // (1 if call is broadcast else size)
        for k in (-1, 77):
            call(check, rng, group, torch.uint8, n + k, k > 0, name=f"{call.__name__} {k:+}")
    check.done()


@pytest.mark.parametrize("op, dtype", [
    ("AVG", torch.float16), ("AVG", torch.int32), ("PREMUL_SUM", torch.bfloat16),
    ("MAX", torch.bool), ("BXOR", torch.uint8), ("MIN", torch.float64),
])  # fmt: skip
def test_reductions(rng, group, op, dtype):
    """Into another tensor, and into the own block of the input."""
    check, n = Check(), PIECE // dtype.itemsize + 77
    for own in (False, True):
        reduce_scatter_tensor(check, rng, group, dtype, n, False, op, f"{op} {dtype} {own}", own)
    reduce_scatter(check, rng, group, dtype, n, True, op, f"{op} {dtype} of a list")
    for root in {0, here()[1] - 1}:
        reduce(check, rng, group, dtype, 2 * n, root == 0, op, f"{op} {dtype} to one", root)
    check.done()


@pytest.mark.one_node
def test_a_reduce_has_the_bits_of_an_all_reduce(rng, group):
    """Whichever rank is the root, and the tensors of the others stay as they are."""
    check, (rank, size) = Check(), here()
    for i, (name, op, dtype) in enumerate(pairs()):
        for bytes_ in (TURNS, 3 * PIECE + 40):
            n = bytes_ // dtype.itemsize
            own = [draw(rng, dtype, n) for _ in range(size)][rank]
            everywhere, to_one = own.clone(), own.clone()
            dist.all_reduce(everywhere, op, group=group)
            dist.reduce(to_one, group_dst=i % size, op=op, group=group)
            want = everywhere if rank == i % size else own
            same = torch.equal(to_one.view(torch.uint8), want.view(torch.uint8))
            check.that(same, f"{name} {dtype} n={n} to {i % size}")
    check.done()


def test_an_input_that_lies_in_the_output(rng, group):
    """In its own place, in another one, and across two of them."""
    check, (rank, size) = Check(), here()
    n = LONG
    for at in (rank * n, (rank + 1) % size * n, n // 2 if size > 1 else 0):
        all_gather_into_tensor(check, rng, group, torch.float32, n, False, f"at {at}", at)
    n = 15_001  # longer ones go through MPI
    for differ in (0, 13):
        for at in range(size):
            if not differ or at != 1:
                gather(check, rng, group, torch.float32, n, False, f"gather, {at}", 0, differ, at)
    for at in range(size):
        scatter(check, rng, group, torch.float32, n, False, f"scatter, {at}", 0, 0, at)
    check.done()


def test_a_readonly_tensor_is_only_read(group):
    """A rank that gets no result may reduce, and give, what it cannot write."""
    rank, size = here()
    array = np.ones(LONG, dtype=np.float32)
    total = array.copy() if rank == 0 else array
    if rank != 0:
        array.flags.writeable = False
    dist.reduce(total, group_dst=0, group=group)
    lists = [np.zeros_like(array) for _ in range(size)] if rank == 0 else None
    dist.gather(array, lists, group_dst=0, group=group)
    parallel_assert(rank != 0 or bool((total == size).all() and all((x == 1).all() for x in lists)))


def test_several_inputs_of_an_all_gather(rng, group):
    check, (rank, size) = Check(), here()
    lengths = (LONG, 3, 0, 40_001)
    parts = [[draw(rng, torch.int16, n) for n in lengths] for _ in range(size)]
    outs = [[poison(torch.int16, n) for n in lengths] for _ in range(size)]
    dist.all_gather_coalesced(outs, [part.clone() for part in parts[rank]], group=group)
    for r in range(size):
        for i, n in enumerate(lengths):
            check.equal(outs[r][i], parts[r][i], f"input {i} of {r}, {n}")
    check.done()


def test_one_block_that_is_far_longer_than_the_others(rng, group):
    """The rank that neither gives nor gets it goes through all of its pieces."""
    check, (rank, size) = Check(), here()
    lengths = [[0] * size for _ in range(size)]
    lengths[size - 1][0] = 60_001
    parts = [[draw(rng, torch.float32, n) for n in lengths[r]] for r in range(size)]
    outs = [torch.full((lengths[r][rank],), -1.0) for r in range(size)]
    for async_op in (False, True):
        finish(dist.all_to_all(outs, parts[rank], group=group, async_op=async_op), async_op)
        for r in range(size):
            check.equal(outs[r], parts[r][rank], f"of {r}")
    check.that(
        shared(group) == (size > 1 and one_node()), f"memory of {group.carrier.node_memory} bytes"
    )
    check.done()


def test_any_order_in_several_groups(rng, group):
    """The halves of the slots are used in turn by all operations, also by all_reduce."""
    check, (rank, size) = Check(), here()
    other = dist.new_group()
    for turn in range(60):
        made = (group, other)[int(rng.integers(2))]
        n = int(rng.choice([1, 700, 5000, 33_000, LONG]))
        which = int(rng.integers(len(OPERATIONS) + 1))
        name = f"turn {turn}, n={n}"
        if which < len(OPERATIONS):
            call = OPERATIONS[which]
            call(check, rng, made, torch.float32, n, bool(rng.integers(2)),
                 name=f"{call.__name__}, {name}")  # fmt: skip
            continue
        parts = [draw(rng, torch.float32, n) for _ in range(size)]
        tensor = parts[rank].clone()
        dist.all_reduce(tensor, group=made)
        check.near(tensor, *reference("SUM", parts), f"all_reduce, {name}")
    dist.destroy_process_group(other)
    check.done()


def test_without_the_entry_check(rng, group):
    """No rank waits for the others before it writes into its slot. Where sizes may differ, no rank
    knows the others', so these take turns with MPI."""
    check, (rank, _) = Check(), here()
    group.carrier.check = 0
    for turn in range(12):
        if turn % 6 == rank:
            time.sleep(0.01)
        for call in OPERATIONS:
            name = f"{call.__name__} {turn}"
            call(check, rng, group, torch.int32, 20_000 + turn, False, name=name)
    group.carrier.check = 1
    check.done()


@pytest.mark.mpi(min_size=2)
def test_without_the_memory_they_go_through_mpi(rng, group):
    rank, size = here()
    check = Check()
    if rank == size - 1:
        group.carrier.node_limit = 0
    for _ in range(2):
        for call in OPERATIONS:
            call(check, rng, group, torch.float32, LONG, False, name=call.__name__)
    check.that(not shared(group), f"memory of {group.carrier.node_memory} bytes")
    check.done()


def start(name: str, group, async_op: bool):
    """The call with LONG elements in all, of which nobody looks at the result."""
    _, size = here()
    whole = torch.ones(LONG // size * size)
    part, out = torch.ones(LONG // size), torch.empty(LONG // size * size)
    return {
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(
            part, whole, group=group, async_op=async_op),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(
            out, part, group=group, async_op=async_op),
        "all_to_all_single": lambda: dist.all_to_all_single(
            out, whole, group=group, async_op=async_op),
        "broadcast": lambda: dist.broadcast(whole, group_src=0, group=group, async_op=async_op),
        "reduce": lambda: dist.reduce(whole, group_dst=0, group=group, async_op=async_op),
    }[name]()  # fmt: skip


NAMES = (
    "reduce_scatter_tensor", "all_gather_into_tensor", "all_to_all_single", "broadcast", "reduce",
)  # fmt: skip


@pytest.mark.one_node
@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("first, async_op", [(False, True), (True, False)],
                         ids=["last, async", "first, sync"])  # fmt: skip
def test_a_rank_that_does_not_come_is_named(rng, group, name, async_op, first):
    """Without the entry check, which would have noticed. Nobody is ended; it goes on over MPI."""
    rank, size = here()
    start(name, group, False)
    parallel_assert(shared(group))
    native, late = group.carrier, 0 if first else size - 1
    native.check, native.timeout = 0, 0.2
    dist.barrier()
    if rank == late:
        dist.recv(torch.empty(1))
    text = ""
    try:
        finish(start(name, group, async_op), async_op)
    except dist.DistTimeoutError as error:
        text = str(error)
    if rank == (late + 1) % size:
        dist.send(torch.zeros(1), late)
    native.check, native.timeout = 1, 20.0
    expected = ["gave up after 0."] + [f"no data from rank {late}"] * (rank != late)
    parallel_assert(any(part in text for part in expected) and name in text, text)
    dist.barrier()
    check = Check()
    for call in OPERATIONS:
        call(check, rng, group, torch.float32, LONG, False, name=f"{call.__name__} afterwards")
    check.done()


@pytest.mark.one_node
@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("name", ["reduce_scatter_tensor", "broadcast", "reduce"])
def test_ctrl_c_while_data_moves(group, name):
    rank, size = here()
    start(name, group, False)
    parallel_assert(shared(group))
    native, text = group.carrier, ""
    native.check = 0
    dist.barrier()
    if rank == 0:
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
    else:
        dist.recv(torch.empty(1), 0)
    try:
        start(name, group, False)
    except KeyboardInterrupt:
        text = "KeyboardInterrupt"
    except dist.DistTimeoutError as error:
        text = str(error)
    for other in range(1, size if rank == 0 else 1):
        dist.send(torch.zeros(1), other)
    native.check = 1
    expected = "KeyboardInterrupt" if rank == 0 else "rank 0 was interrupted while data moved in"
    parallel_assert(expected in text, text)
    start(name, group, False)
