"""Long all_reduces within a node: through memory that its ranks share.

The kill in the middle of one is in test_endings.py, with everything else that ends a job.
"""

import os
import resource
import signal
import threading
import time

import pytest
import torch
from cases import Check, draw, finish, here, pairs, reduce_at_odd_address, reference
from lateness import hear, once_others_have_ended, tell_all
from patience import at_most
from resources import held
from worlds import one_node

import hpcdist as dist
from hpcdist.testing import parallel_assert

pytestmark = pytest.mark.ranks

#: Bytes from which tensors go that way, and of their pieces with and without a core for each rank.
LEAST, PIECES = 4 << 10, (256 << 10, 1 << 20)
LONG = 100_003  # elements


@pytest.fixture
def group():
    made = dist.new_group()
    yield made
    dist.destroy_process_group(made)


def shared(group) -> bool:
    return group.carrier.node_memory > 0


def right(group, rng, n: int = LONG) -> bool:
    """Whether an all-reduce of n float32 over a group of all ranks gives what it must."""
    rank, size = here()
    parts = [draw(rng, torch.float32, n) for _ in range(size)]
    tensor = parts[rank].clone()
    dist.all_reduce(tensor, group=group)
    want, bound = reference("SUM", parts)
    return bool(((tensor.double() - want).abs() <= bound).all())


def test_every_dtype_and_operation_around_the_least_size(rng, group):
    check, (rank, size) = Check(), here()
    for name, op, dtype in pairs():
        least = LEAST // dtype.itemsize
        for n in (least - 1, least, least + 1, 3 * least + 5):
            label = f"{name} {dtype} n={n}"
            parts = [draw(rng, dtype, n) for _ in range(size)]
            want, bound = reference(name, parts)
            for async_op in (False, True):
                tensor = parts[rank].clone()
                finish(dist.all_reduce(tensor, op, group=group, async_op=async_op), async_op)
                check.near(tensor, want, bound, label)
                check.everywhere(tensor, label)
    check.that(
        shared(group) == (size > 1 and one_node()), f"memory of {group.carrier.node_memory} bytes"
    )
    check.done()


@pytest.mark.one_node
def test_sums_have_the_bits_of_those_in_the_order_of_ranks(rng, group):
    """Whatever slice a rank combines, and in whatever pieces: a program can repeat them."""
    check, (rank, size) = Check(), here()
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        for n in (LEAST, LONG, 700_001):
            parts = [draw(rng, dtype, n) for _ in range(size)]
            half = dtype == torch.float16 and size > 1  # whose average is scaled before the sum
            for op, scaled in (
                (dist.ReduceOp.SUM, parts),
                (dist.ReduceOp.AVG, [p * (1 / size) if half else p for p in parts]),
            ):
                want = scaled[0].clone()
                for part in scaled[1:]:
                    want += part
                if op == dist.ReduceOp.AVG and not half:
                    want /= size
                tensor = parts[rank].clone()
                dist.all_reduce(tensor, op, group=group)
                check.equal(tensor, want, f"{op} {dtype} n={n}")
    check.done()


def test_short_tensors_when_the_group_has_the_memory(rng, group):
    check, (rank, size) = Check(), here()
    for n in (17, 100, 1023):
        check.that(right(group, rng, n), f"without: n={n}")
    check.that(not shared(group), "short tensors alone take no memory")
    check.that(right(group, rng) and shared(group) == (size > 1 and one_node()), "a long one")
    for name, op, dtype in pairs():
        for n in (64 // dtype.itemsize + 1, 130, 511):
            label = f"{name} {dtype} n={n}"
            parts = [draw(rng, dtype, n) for _ in range(size)]
            tensor = parts[rank].clone()
            dist.all_reduce(tensor, op, group=group)
            check.near(tensor, *reference(name, parts), label)
            check.everywhere(tensor, label)
    check.done()


@pytest.mark.parametrize("name, dtype", [
    ("SUM", torch.float32), ("AVG", torch.bfloat16), ("AVG", torch.float16), ("MAX", torch.int8),
    ("PREMUL_SUM", torch.complex128),
])  # fmt: skip
def test_around_whole_pieces(rng, group, name, dtype):
    check = Check()
    for piece in PIECES:
        piece //= dtype.itemsize
        small = draw(rng, dtype, 10_007)
        for n in (piece - 1, piece, piece + 1, 2 * piece + 1, 3 * piece - 63 // dtype.itemsize):
            reduce_at_odd_address(check, name, small, n, group)
    check.done()


def test_many_in_flight_in_several_groups(rng, group):
    """Lanes of one group each, at once: of all ranks, of all in reverse, of all but the first."""
    check, (rank, size) = Check(), here()
    groups = [(group, list(range(size)))]
    for ranks in (list(reversed(range(size))), list(range(1, size)) or [0]):
        groups.append((dist.new_group(ranks), ranks))
    jobs = []
    for turn in range(12):
        for made, ranks in groups:
            n = (LONG, 1001, 20_000)[turn % 3]
            parts = [draw(rng, torch.float32, n) for _ in ranks]
            if rank in ranks:
                tensor = parts[ranks.index(rank)].clone()
                work = dist.all_reduce(tensor, group=made, async_op=True)
                jobs.append((work, tensor, parts, f"turn {turn} of {ranks}"))
    for work, tensor, parts, label in jobs:
        work.wait()
        check.near(tensor, *reference("SUM", parts), label)
    listed = [[draw(rng, torch.float32, n) for n in (3, LONG, 0, 1001)] for _ in range(size)]
    mine = [t.clone() for t in listed[rank]]
    dist.all_reduce_coalesced(mine, group=group)
    for i, tensor in enumerate(mine):
        check.near(tensor, *reference("SUM", [each[i] for each in listed]), f"of a list, {i}")
    for made, ranks in groups[1:]:
        if rank in ranks:
            dist.destroy_process_group(made)
    check.done()


def test_nothing_is_left_of_a_group(rng):
    before = held()
    for _ in range(3):
        made = dist.new_group()
        parallel_assert(right(made, rng))
        parallel_assert(shared(made) == (dist.get_world_size() > 1 and one_node()))
        dist.destroy_process_group(made)
    after = held()
    parallel_assert((after.mappings, after.files) == (before.mappings, before.files), str(after))
    dist.barrier()


def limited(which: int, value: int):
    """A limit of this process to set, and what to set it back to."""
    old = resource.getrlimit(which)
    resource.setrlimit(which, (value, old[1]))
    return which, old


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("how", ["off", "off on one rank", "little", "no space", "no descriptor"])
def test_without_the_memory_it_goes_through_mpi(rng, group, how):
    rank, size = here()
    last, limit = rank == size - 1, None
    if how == "off" or (how == "off on one rank" and last):
        group.carrier.node_limit = 0
    elif how == "little":
        group.carrier.node_limit = 1 << 14
    elif how == "no space" and rank == 0:  # who makes the file
        limit = limited(resource.RLIMIT_FSIZE, 4096)
    elif how == "no descriptor" and last:
        limit = limited(resource.RLIMIT_NOFILE, 3)
    try:
        ok = right(group, rng)
    finally:
        if limit:
            resource.setrlimit(*limit)
    parallel_assert(ok and not shared(group), f"{how}: {group.carrier.node_memory}")
    # and it is not tried again
    parallel_assert(right(group, rng) and not shared(group))


@pytest.mark.one_node
@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])
def test_a_rank_that_does_not_come_is_named(rng, group, async_op):
    """Without the entry check, which would have noticed. Nobody is ended; it goes on over MPI."""
    rank, size = here()
    parallel_assert(right(group, rng) and shared(group))
    native, late = group.carrier, size - 1
    native.check, native.timeout = 0, 0.6
    dist.barrier()
    text = ""
    with once_others_have_ended(late):
        began = time.monotonic()
        try:
            work = dist.all_reduce(torch.ones(LONG), group=group, async_op=async_op)
            finish(work, async_op)
        except dist.DistTimeoutError as error:
            text = str(error)
        took = time.monotonic() - began
    native.check, native.timeout = 1, 20.0
    expected = "gave up after" in text or (rank != late and f"no data from rank {late}" in text)
    in_time = rank == late or 0.5 < took < at_most(0.6)
    parallel_assert(expected and in_time, f"{took:.2f} s: {text}")
    dist.barrier()
    parallel_assert(right(group, rng), "afterwards")


@pytest.mark.one_node
@pytest.mark.mpi(min_size=2)
def test_ctrl_c_while_data_moves(rng, group):
    rank, size = here()
    parallel_assert(right(group, rng) and shared(group))
    native = group.carrier
    native.check = 0
    dist.barrier()
    text = ""
    if rank == 0:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    else:
        hear(0)
    try:
        dist.all_reduce(torch.ones(LONG), group=group)
    except KeyboardInterrupt:
        text = "KeyboardInterrupt"
        tell_all()
    except dist.DistTimeoutError as error:
        text = str(error)
    native.check = 1
    expected = "KeyboardInterrupt" if rank == 0 else "rank 0 was interrupted while data moved in"
    parallel_assert(expected in text, text)
    parallel_assert(right(group, rng), "afterwards")
