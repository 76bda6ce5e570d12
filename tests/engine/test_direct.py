"""Operations that read symmetric tensors of other ranks where they lie."""

import os
import subprocess
import time

import pytest
import torch
from cases import MOVED, OPS, REDUCED, Check, draw, finish, here, pairs, poison, promised, reference
from worlds import one_node

import hpcdist as dist
from hpcdist.testing import parallel_assert

pytestmark = pytest.mark.ranks

LEAST = 4 << 10  # bytes of the shortest tensors that go that way
PIECES = (256 << 10, 1 << 20)  # bytes: with and without a core for each rank
LONG = 100_003  # elements


@pytest.fixture
def group():
    made = dist.new_group()
    yield made
    dist.destroy_process_group(made)


def placed(part: torch.Tensor, group, before: int = 0) -> torch.Tensor:
    """A symmetric tensor with these values, that many elements behind the beginning."""
    whole = dist.empty(part.numel() + before, dtype=part.dtype, group=group)
    return whole[before:].copy_(part)


def shared(tensor, group) -> bool:
    return dist.is_symmetric(tensor, group)


def test_all_reduce_gives_the_bits_of_other_tensors(rng, group):
    check, (rank, size) = Check(), here()
    for name, op, dtype in pairs():
        least = LEAST // dtype.itemsize
        for n in (0, 1, least - 1, least, 3 * least + 5):
            label = f"{name} {dtype} n={n}"
            parts = [draw(rng, dtype, n) for _ in range(size)]
            other = parts[rank].clone()
            dist.all_reduce(other, op, group=group)
            for async_op in (False, True):
                tensor = placed(parts[rank], group)
                check.that(
                    shared(tensor, group) == (size > 1 and n > 0 and one_node()),
                    f"{label}: symmetric",
                )
                finish(dist.all_reduce(tensor, op, group=group, async_op=async_op), async_op)
                check.near(tensor, *reference(name, parts), label)
                check.everywhere(tensor, label)
                if n >= least:
                    check.equal(tensor, other, f"{label}: beside the other way")
    check.done()


@pytest.mark.parametrize("name, dtype", [
    ("SUM", torch.float32), ("AVG", torch.bfloat16), ("AVG", torch.float16), ("MAX", torch.int8),
    ("PREMUL_SUM", torch.complex128),
])  # fmt: skip
def test_around_whole_pieces_at_odd_places(rng, group, name, dtype):
    """The views begin at another place on each rank; what lies beside them stays as it is."""
    check, (rank, size) = Check(), here()
    for piece in PIECES:
        piece //= dtype.itemsize
        small = draw(rng, dtype, 10_007)
        for n in (piece - 1, piece, piece + 1, 3 * piece - 63 // dtype.itemsize):
            parts = [torch.roll(small, 131 * r).repeat(n // 10_007 + 1)[:n] for r in range(size)]
            whole = dist.empty(n + 16, dtype=dtype, group=group).copy_(
                torch.roll(small, 5).repeat(n // 10_007 + 2)[: n + 16])  # fmt: skip
            at = 3 + rank % 5
            beside = whole[:at].clone(), whole[at + n :].clone()
            mine = whole[at : at + n].copy_(parts[rank])
            other = parts[rank].clone()
            dist.all_reduce(mine, OPS[name], group=group)
            dist.all_reduce(other, OPS[name], group=group)
            label = f"{name} {dtype} n={n}"
            check.near(mine, *reference(name, parts), label)
            check.equal(mine, other, f"{label}: beside the other way")
            check.equal(whole[:at], beside[0], f"{label}: before")
            check.equal(whole[at + n :], beside[1], f"{label}: behind")
    check.done()


def test_lists_of_them(rng, group):
    check, (rank, size) = Check(), here()
    lengths = (3, LONG, 0, 1001)
    listed = [[draw(rng, torch.float32, n) for n in lengths] for _ in range(size)]
    for symmetric in ((1, 1, 1, 1), (1, 0, 1, 1)):  # of the second one, one tensor is not
        mine = [
            placed(part, group) if wanted else part.clone()
            for part, wanted in zip(listed[rank], symmetric, strict=True)
        ]
        dist.all_reduce_coalesced(mine, group=group)
        for i, tensor in enumerate(mine):
            want = reference("SUM", [each[i] for each in listed])
            check.near(tensor, *want, f"{symmetric}: {i}")
    check.done()


def test_reduce_scatter_tensor(rng, group):
    """Into another tensor, into the own block of the input, and across blocks of it."""
    check, (rank, size) = Check(), here()
    for dtype in REDUCED:
        for name in ("SUM", "AVG", "MAX", "PREMUL_SUM"):
            if not promised(name, dtype):
                continue
            for n in (1, LEAST // dtype.itemsize + 3, 20_011):
                label = f"{name} {dtype} n={n}"
                parts = [draw(rng, dtype, n * size) for _ in range(size)]
                want = reference(name, [part[rank * n : (rank + 1) * n] for part in parts])
                source = placed(parts[rank], group, before=1)
                out = poison(dtype, n)
                dist.reduce_scatter_tensor(out, source, OPS[name], group=group)
                check.near(out, *want, label)
                check.equal(source, parts[rank], f"{label}: the input")
                own = source[rank * n : (rank + 1) * n]
                dist.reduce_scatter_tensor(own, source, OPS[name], group=group)
                check.near(own, *want, f"{label}: in its own block")
                source.copy_(parts[rank])
                across = source[: n * size][(size - 1) * n // 2 :][:n]
                dist.reduce_scatter_tensor(across, source, OPS[name], group=group)
                check.near(across, *want, f"{label}: across blocks")
    check.done()


def test_all_gather_into_tensor(rng, group):
    """From another tensor, from its own place in the output, and from another rank's place."""
    check, (rank, size) = Check(), here()
    for dtype in MOVED:
        for n in (1, LEAST // dtype.itemsize + 3, 20_011):
            label = f"{dtype} n={n}"
            parts = [draw(rng, dtype, n) for _ in range(size)]
            want = torch.cat([part.view(torch.uint8) for part in parts]).view(dtype)
            out = poison(dtype, n * size)
            dist.all_gather_into_tensor(out, placed(parts[rank], group), group=group)
            check.equal(out, want, label)
            for place, where in ((rank, "own"), ((rank + 1) % size, "next")):
                out = dist.empty(n * size, dtype=dtype, group=group)
                out.view(torch.uint8).copy_(poison(dtype, n * size).view(torch.uint8))
                mine = out[place * n : (place + 1) * n]
                mine.view(torch.uint8).copy_(parts[rank].view(torch.uint8))
                dist.all_gather_into_tensor(out, mine, group=group)
                check.equal(out, want, f"{label}: from its {where} place")
    check.done()


@pytest.mark.mpi(min_size=2)
def test_one_rank_without_it(rng, group):
    """Then no rank reads the others' tensors, and all get the same numbers as ever."""
    check, (rank, size) = Check(), here()
    for lacking in range(size):
        parts = [draw(rng, torch.float32, LONG * size) for _ in range(size)]
        both = placed(parts[rank], group)
        mine = parts[rank].clone() if rank == lacking else both
        out = poison(torch.float32, LONG)
        dist.reduce_scatter_tensor(out, mine, group=group)
        mine_of = [part[rank * LONG : (rank + 1) * LONG] for part in parts]
        check.near(out, *reference("SUM", mine_of), f"scattered, {lacking}")
        gathered = poison(torch.float32, LONG * size)
        dist.all_gather_into_tensor(gathered, mine[:LONG], group=group)
        check.equal(gathered, torch.cat([part[:LONG] for part in parts]), f"gathered, {lacking}")
        dist.all_reduce(mine, group=group)
        check.near(mine, *reference("SUM", parts), f"reduced, {lacking}")
    check.done()


def test_other_groups_take_the_tensors_too(rng, group):
    rank, size = here()
    parts = [draw(rng, torch.float64, LONG) for _ in range(size)]
    tensor = placed(parts[rank], group)
    parallel_assert(not dist.is_symmetric(tensor), "not of the default group")
    dist.all_reduce(tensor)
    want, bound = reference("SUM", parts)
    parallel_assert(bool(((tensor - want).abs() <= bound).all()))


@pytest.mark.one_node
@pytest.mark.mpi(min_size=2)
@pytest.mark.deadline(120)
def test_a_rank_that_is_stopped_while_data_moves(group):
    """The others give up. What they then write into their tensors stays, also when it goes on."""
    rank, size = here()
    late, native, text = size - 1, group.carrier, ""
    tensor = dist.zeros(4 << 20, group=group)
    pids = [None] * size
    dist.all_gather_object(pids, os.getpid())
    dist.all_reduce(tensor, group=group)
    for attempt in range(20):
        native.timeout = 0.3
        dist.barrier()
        if rank == 0:
            stop = f"kill -STOP {pids[late]}; sleep 0.6; kill -CONT {pids[late]}"
            subprocess.Popen(["sh", "-c", f"sleep 0.0{3 + attempt % 5}; {stop}"])
        text = ""
        for _ in range(400):
            try:
                dist.all_reduce(tensor, group=group)
            except dist.DistTimeoutError as error:
                text = str(error)
                break
        tensor.fill_(rank + 7)
        native.timeout = 20.0
        time.sleep(1.0)
        dist.barrier()
        if "data moved" in text:
            break
    parallel_assert("data moved" in text, text)
    parallel_assert(bool((tensor == rank + 7).all()), "nothing was written after the error")
    dist.all_reduce(tensor, group=group)
    parallel_assert(bool((tensor == sum(r + 7 for r in range(size))).all()), "it goes on over MPI")
    parallel_assert(not shared(tensor, group), "and is not symmetric any more")
