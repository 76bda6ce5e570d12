"""Ranks that disagree about a call, or do not come: all are told, and the group goes on."""

from __future__ import annotations

import os
import re
import time

import numpy as np
import pytest
import torch
from lateness import once_others_have_ended
from worlds import one_node

import hpcdist as dist
from hpcdist._engine import ASYNC_HERE
from hpcdist.testing import parallel_assert, parallel_raises

pytestmark = [pytest.mark.ranks, pytest.mark.mpi(min_size=2)]


def cases(rank: int, odd: int) -> dict:
    """Calls that rank `odd` makes otherwise than the others; name -> call."""
    mine = rank == odd
    f4, f8, i4 = torch.ones(4), torch.ones(8), torch.ones(4, dtype=torch.int32)
    size = dist.get_world_size()
    outs = [torch.empty(4) for _ in range(size)]
    longer = [torch.empty(5 if r == odd and mine else 4) for r in range(size)]
    six = torch.ones(2, 3)
    pair = [torch.ones(2), torch.ones(3)]
    root = odd if mine else (odd + 1) % size
    return {
        "operation": lambda: dist.broadcast(f4, 0) if mine else dist.all_reduce(f4),
        "operation against barrier": lambda: dist.barrier() if mine else dist.all_reduce(f4),
        "count": lambda: dist.all_reduce(f8 if mine else f4),
        "shape": lambda: dist.all_reduce(six.reshape(3, 2) if mine else six),
        "strides": lambda: dist.all_reduce(six.clone().t() if mine else torch.ones(3, 2)),
        "dtype": lambda: dist.all_reduce(i4 if mine else f4),
        "same width": lambda: dist.all_reduce(
            torch.ones(4, dtype=torch.bfloat16 if mine else torch.float16)
        ),
        "reduce op": lambda: dist.all_reduce(f4, dist.ReduceOp.MAX if mine else dist.ReduceOp.SUM),
        "factor": lambda: dist.all_reduce(f4, dist.ReduceOp.PREMUL_SUM(0.5 if mine else 0.25)),
        "root of broadcast": lambda: dist.broadcast(f4, root),
        "root of reduce": lambda: dist.reduce(f4, root),
        "count of broadcast": lambda: dist.broadcast(f8 if mine else f4, 0),
        "dtype of all_gather_into_tensor": lambda: dist.all_gather_into_tensor(
            torch.empty(4 * size, dtype=torch.int32 if mine else torch.float32), i4 if mine else f4
        ),
        "sizes of a list": lambda: dist.all_gather(
            longer if mine else outs, torch.ones(longer[rank].numel())
        ),
        "coalesced length": lambda: dist.all_reduce_coalesced(pair[:1] if mine else pair),
        "coalesced sizes": lambda: dist.all_reduce_coalesced(pair[::-1] if mine else pair),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(
            torch.empty(2 if mine else 1), torch.ones((2 if mine else 1) * size)
        ),
        "gather counts": lambda: dist.gather(
            f8 if mine else f4,
            [torch.empty(4) for _ in range(size)] if rank == (odd + 1) % size else None,
            dst=(odd + 1) % size,
        ),
        "scatter counts": lambda: dist.scatter(
            f8 if mine else f4,
            [torch.ones(4) for _ in range(size)] if rank == (odd + 1) % size else None,
            src=(odd + 1) % size,
        ),
        "all_to_all counts": lambda: dist.all_to_all(
            [torch.empty(3 if mine else 2) for _ in range(size)],
            [torch.ones(2) for _ in range(size)],
        ),
        "splits": lambda: dist.all_to_all_single(
            torch.empty(2 * size),
            torch.ones(2 * size),
            input_split_sizes=[2] * size,
            output_split_sizes=([1, 3] + [2] * (size - 2)) if mine else [2] * size,
        ),
    }


def check(group, timeout_s: float) -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    for odd in range(size):
        for name, call in cases(rank, odd).items():
            began = time.monotonic()
            with parallel_raises(dist.DistMismatchError, match="disagree"):
                call()
            parallel_assert(time.monotonic() - began < timeout_s, f"{name}: too slow")
            good = torch.full((3,), rank + 1.0)
            dist.all_reduce(good)
            parallel_assert(good.tolist() == [size * (size + 1) / 2] * 3, f"after {name}: {good}")


def test_every_mismatch_is_told_on_all_ranks_and_the_group_goes_on():
    check(None, 5.0)  # a second is the promise; the machine that tests may be busy


def test_the_text_quotes_both_sides_the_number_and_the_lines():
    rank, size = dist.get_rank(), dist.get_world_size()
    text, seq = "", dist.group.WORLD.carrier.seq + 1
    try:
        if rank == 0:
            dist.all_reduce(torch.ones(4, 3), dist.ReduceOp.AVG)  # line A
        else:
            dist.reduce(torch.ones(5), 0)  # line B
    except dist.DistMismatchError as error:
        text = str(error)
    parallel_assert("all_reduce(float32[4, 3], op=AVG) at engine/test_agreement.py:" in text, text)
    parallel_assert("reduce(float32[5], op=SUM, root=0) at engine/test_agreement.py:" in text, text)
    parallel_assert(
        f"collective #{seq} " in text and f"this is rank {rank} of {size}" in text, text
    )
    everybody = "rank 1:" if size == 2 else "ranks " + ", ".join(map(str, range(1, size))) + ":"
    parallel_assert("\n  rank 0: all_reduce" in text and f"\n  {everybody} reduce" in text, text)


def test_async_operations_carry_their_errors():
    rank = dist.get_rank()
    before = dist.all_reduce(torch.ones(2), async_op=True)
    wrong = dist.all_reduce(torch.ones(2 + rank), async_op=True)
    after = dist.all_reduce(torch.ones(2), async_op=True)
    parallel_assert(before.wait() is True)
    with parallel_raises(dist.DistMismatchError, match="test_agreement.py"):
        wrong.wait()
    parallel_assert(
        lambda: not wrong.is_success() and isinstance(wrong.exception(), dist.DistMismatchError)
    )
    parallel_assert(after.wait() is True and after.is_success())
    failed = dist.all_reduce(torch.ones(2 + rank), async_op=True).get_future()
    with parallel_raises(dist.DistMismatchError):
        failed.wait()


def test_sync_and_async_calls_match_each_other_in_order():
    """Where hpcdist or torch may do the one here and the other there."""
    rank, size = dist.get_rank(), dist.get_world_size()
    rng = np.random.default_rng(rank)
    native = dist.group.WORLD.carrier
    for _ in range(60):
        x, y = torch.full((1000,), rank + 1.0), torch.full((300_000,), float(rank))
        w = native.all_reduce(x, async_op=bool(rng.integers(2)) and ASYNC_HERE)
        v = native.all_reduce(y, async_op=bool(rng.integers(2)), api="test")
        for work in (v, w):
            if work is not None:
                work.wait()
        parallel_assert(
            bool((x == size * (size + 1) / 2).all() and (y == size * (size - 1) / 2).all())
        )


@pytest.mark.parametrize("transport", ["shared memory", "MPI"])
def test_async_against_sync_is_a_mismatch(transport):
    rank, size = dist.get_rank(), dist.get_world_size()
    group = other_transport(transport)
    for n in (1, 1000):
        for odd in range(size):
            with parallel_raises(dist.DistMismatchError, match="async_op=True") as caught:
                work = dist.all_reduce(torch.ones(n), group=group, async_op=rank == odd)
                if work is not None:
                    work.wait()
            (marked,) = [each for each in str(caught.value).splitlines() if "async_op" in each]
            parallel_assert(f"rank {odd}:" in marked, marked)
            x = torch.ones(n)
            dist.all_reduce(x, group=group)
            parallel_assert(x.tolist() == [size] * n)
    dist.destroy_process_group(group)


@pytest.mark.parametrize("transport", ["shared memory", "MPI"])
def test_a_peer_that_does_not_come_is_named(transport):
    rank, size = dist.get_rank(), dist.get_world_size()
    late = size - 1
    group = other_transport(transport)
    native = group.carrier
    through = {transport}
    if transport != "MPI" and not one_node():  # of each node, if it has several ranks
        transport, through = "MPI", {"MPI", "shared memory and MPI"}
    parallel_assert(native.checks_through in through, native.checks_through)
    native.timeout = 0.6
    dist.barrier()
    text = ""
    with once_others_have_ended(late):
        try:
            dist.all_reduce(torch.ones(3), group=group)
        except dist.DistTimeoutError as error:
            text = str(error)
    # Whoever gives up first tells the others, and between nodes for whom it has waited.
    told = r"gave up.*, waiting for rank [\d, ]*\b" if transport == "MPI" else "gave up.*"
    named = f"rank {late} has not joined" in text and rank != late
    named = named or re.search(told + (str(late) if transport == "MPI" else ""), text) is not None
    parallel_assert(named, text)
    parallel_assert("test_agreement.py" in text and "can still be used" in text, text)
    native.timeout = 20
    x = torch.ones(3)
    dist.all_reduce(x, group=group)
    parallel_assert(x.tolist() == [size] * 3)
    dist.destroy_process_group(group)


def other_transport(transport: str):
    """A group of all ranks whose entry check goes through shared memory, or as between nodes."""
    if transport == "MPI":
        os.environ["HPCDIST_CHECK_TRANSPORT"] = "mpi"
    try:
        return dist.new_group(list(range(dist.get_world_size())))
    finally:
        os.environ.pop("HPCDIST_CHECK_TRANSPORT", None)


def test_mismatches_are_told_between_nodes_too():
    rank, size = dist.get_rank(), dist.get_world_size()
    group = other_transport("MPI")
    for bad in (
        torch.ones(4 + (rank == 0)),
        torch.ones(4, dtype=torch.int32 if rank == 0 else torch.float32),
    ):
        with parallel_raises(dist.DistMismatchError, match="disagree"):
            dist.all_reduce(bad, group=group)
        x = torch.ones(2)
        dist.all_reduce(x, group=group)
        parallel_assert(x.tolist() == [size] * 2)
    outs = [torch.empty(r + 1) for r in range(size)]
    dist.all_gather(outs, torch.full((rank + 1,), float(rank)), group=group)
    parallel_assert(all(o.tolist() == [float(r)] * (r + 1) for r, o in enumerate(outs)))
    sizes = [r + 1 for r in range(size)]
    out = torch.empty((rank + 1) * size)
    dist.all_to_all_single(
        out, torch.ones(sum(sizes)) * rank, [rank + 1] * size, sizes, group=group
    )
    parallel_assert(out.tolist() == [float(r) for r in range(size) for _ in range(rank + 1)])
    dist.destroy_process_group(group)


def test_level_off_and_full():
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.new_group(list(range(size)))
    for level in (0, 2):
        group.carrier.check = level
        for n in (0, 1, 1000, 70_000):
            x = torch.full((n,), rank + 1.0)
            dist.all_reduce(x, group=group)
            y = torch.full((n,), float(rank))
            dist.broadcast(y, size - 1, group=group)
            z = torch.empty(n * size)
            dist.all_gather_into_tensor(z, torch.full((n,), float(rank)), group=group)
            want = np.repeat(np.arange(size, dtype=np.float32), n)
            parallel_assert(
                bool((x == size * (size + 1) / 2).all() and (y == size - 1).all())
                and np.array_equal(z, want),
                f"level {level}, {n} elements",
            )
        dist.barrier(group=group)
    dist.destroy_process_group(group)


def test_two_groups_at_once_do_not_deadlock():
    """Each rank starts its operations on two groups in another order: lanes are independent."""
    rank, size = dist.get_rank(), dist.get_world_size()
    a, b = dist.new_group(list(range(size))), dist.new_group(list(range(size)))
    for n in (3, 500_000):
        x, y = torch.full((n,), 1.0), torch.full((n,), 2.0)
        order = [(x, a), (y, b)] if rank % 2 else [(y, b), (x, a)]
        works = [dist.all_reduce(t, group=g, async_op=True) for t, g in order]
        for work in reversed(works):
            work.wait()
        parallel_assert(bool((x == size).all() and (y == 2 * size).all()))
    dist.destroy_process_group(a)
    dist.destroy_process_group(b)


def test_views_that_hold_other_numbers_are_refused():
    z = torch.tensor([1 + 2j, 3 - 1j])
    for lazy in (z.conj(), torch._neg_view(torch.ones(3)), z.conj().imag):
        for _ in range(2):  # the second time the type is known
            with parallel_raises(ValueError, match="lazily"):
                dist.all_reduce(lazy)
            dist.all_reduce(torch.ones(3))


@pytest.mark.parametrize("transport", ["shared memory", "MPI"])
def test_giving_up_is_one_decision_for_all(transport):
    """Ranks come as late as the others are patient: a call succeeds everywhere or nowhere."""
    rank, size = dist.get_rank(), dist.get_world_size()
    group = other_transport(transport)
    through_memory = transport == "shared memory" and one_node()
    rounds, patience = (120, 0.01) if through_memory else (20, 0.08)
    rng = np.random.default_rng()
    done, wrong = [], []
    for i in range(rounds):
        dist.barrier()
        group.carrier.timeout = patience
        n = (3, 1000)[i % 2]  # through the check itself, and through MPI
        x = torch.full((n,), float(rank + i))
        if rng.random() < 0.5:
            time.sleep(rng.uniform(0, 2 * patience))
        try:
            dist.all_reduce(x, group=group)
            done.append(1)
            if not bool((x == sum(r + i for r in range(size))).all()):
                wrong.append(i)
        except dist.DistTimeoutError:
            done.append(0)
            if not bool((x == rank + i).all()):
                wrong.append(i)
    parallel_assert(not wrong, wrong)
    everybody = [torch.empty(rounds, dtype=torch.int64) for _ in range(size)]
    dist.all_gather(everybody, torch.tensor(done))
    parallel_assert(
        all(torch.equal(e, everybody[0]) for e in everybody), [e.tolist() for e in everybody]
    )
    group.carrier.timeout = 20
    dist.barrier(group=group)
    dist.destroy_process_group(group)


def test_inside_backward_the_line_is_the_users():
    weight = torch.ones(3, requires_grad=True)
    extra = int(dist.get_rank() == 0)
    weight.register_hook(lambda grad: dist.all_reduce(torch.ones(2 + extra)))
    text = ""
    try:
        weight.sum().backward()
    except dist.DistMismatchError as error:
        text = str(error)
    parallel_assert("test_agreement.py" in text and "torch/autograd" not in text, text)
