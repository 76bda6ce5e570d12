"""Arguments that are wrong on some ranks only: all hear it at once, and stay in step."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from cases import Check, here

import hpcdist as dist
import hpcdist.nn.functional
from hpcdist import ReduceOp
from hpcdist.backends.dispatch import agreeing
from hpcdist.backends.refusal import bursts
from hpcdist.testing import parallel_assert

pytestmark = [pytest.mark.ranks, pytest.mark.mpi(min_size=2)]

#: Seconds. The promise is at once; the test may share its cores with anything.
AT_ONCE = 5.0

Call = Callable[[bool], Any]


@dataclass(frozen=True)
class Kind:
    """A call that is right or wrong, and what a wrong one raises where it is made."""

    call: Callable[[bool, bool, Any], Any]  # wrong, async_op, group
    error: type[Exception]
    sync_only: bool = False


def read_only() -> np.ndarray:
    array = np.ones(4, np.float32)
    array.flags.writeable = False
    return array


def freed() -> torch.Tensor:
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(0)
    return tensor


class Unreadable:
    """Cannot be encoded: no codec is registered for it."""


def kinds(rank: int, size: int) -> dict[str, Kind]:
    """Every way in which a rank refuses its own arguments."""
    t, each = torch.ones(4), [torch.empty(4) for _ in range(size)]
    flat = torch.empty(4 * size)
    k: dict[str, Any] = {}

    def add(name: str, error: type[Exception], call: Any, sync_only: bool = False) -> None:
        k[name] = Kind(call, error, sync_only)

    V, T = ValueError, TypeError
    add(
        "sizes of all_gather_into_tensor",
        V,
        lambda w, a, g: dist.all_gather_into_tensor(flat, torch.ones(5) if w else t, g, a),
    )
    add(
        "sizes of reduce_scatter_tensor",
        V,
        lambda w, a, g: dist.reduce_scatter_tensor(
            torch.ones(5) if w else torch.ones(4), flat, ReduceOp.SUM, g, a
        ),
    )
    add("list too short", V, lambda w, a, g: dist.all_gather(each[1:] if w else each, t, g, a))
    add("own place", V, lambda w, a, g: dist.all_gather(each, torch.ones(3) if w else t, g, a))
    add(
        "dtypes in a list",
        T,
        lambda w, a, g: dist.all_reduce_coalesced(
            [t, t.double() if w else t.clone()], ReduceOp.SUM, g, a
        ),
    )
    add(
        "complex among real",
        T,
        lambda w, a, g: dist.all_reduce_coalesced(
            [t, t.to(torch.cfloat)] if w else [t, t.clone()], ReduceOp.MAX, g, a
        ),
    )
    add(
        "gaps",
        V,
        lambda w, a, g: dist.all_reduce(torch.ones(8)[::2] if w else t, ReduceOp.SUM, g, a),
    )
    add("no tensor", T, lambda w, a, g: dist.broadcast(None if w else t, 0, g, a))
    add(
        "read-only", V, lambda w, a, g: dist.all_reduce(read_only() if w else t, ReduceOp.SUM, g, a)
    )
    add(
        "leaf",
        V,
        lambda w, a, g: dist.reduce(
            torch.ones(4, requires_grad=True)
            if w and rank == 0
            else torch.ones(3)[::2]
            if w
            else t,
            0,
            ReduceOp.SUM,
            g,
            a,
        ),
    )
    add("freed memory", T, lambda w, a, g: dist.all_reduce(freed() if w else t, ReduceOp.SUM, g, a))
    add("root outside", V, lambda w, a, g: dist.broadcast(t, 99 if w else 0, g, a))
    add("no root", V, lambda w, a, g: dist.reduce(t, None if w else 0, ReduceOp.SUM, g, a))
    add(
        "gather_list",
        V,
        lambda w, a, g: dist.gather(t, each if w != (rank == 0) else None, 0, g, a),
    )
    add(
        "scatter_list",
        V,
        lambda w, a, g: dist.scatter(torch.empty(4), each if w != (rank == 0) else None, 0, g, a),
    )
    add(
        "reduce-op",
        T,
        lambda w, a, g: dist.all_reduce(t, ReduceOp.BXOR if w else ReduceOp.SUM, g, a),
    )
    add(
        "no reduce-op",
        T,
        lambda w, a, g: dist.reduce_scatter(
            torch.empty(4), each, None if w else ReduceOp.SUM, g, a
        ),
    )
    add(
        "splits",
        V,
        lambda w, a, g: dist.all_to_all_single(
            torch.empty(size), torch.ones(size), [2] * size if w else None, None, g, a
        ),
    )
    add(
        "list of all_to_all",
        V,
        lambda w, a, g: dist.all_to_all(each[:1] * (size + 1) if w else each, [t] * size, g, a),
    )
    add(
        "outputs that overlap",
        V,
        lambda w, a, g: dist.all_gather([flat[:4]] * size if w else each, t, g, a),
    )
    add(
        "sparse with MAX",
        V,
        lambda w, a, g: dist.all_reduce(t.to_sparse() if w else t, ReduceOp.MAX, g, a),
    )
    add("device_ids", T, lambda w, a, g: dist.barrier(g, a, device_ids=3 if w else None))
    add(
        "list of objects",
        T,
        lambda w, a, g: dist.all_gather_object(() if w else [None] * size, 1, g),
        True,
    )
    add(
        "root of objects",
        V,
        lambda w, a, g: dist.broadcast_object_list([1], 99 if w else 0, g),
        True,
    )
    add("differentiable", V, lambda w, a, g: dist.nn.functional.all_to_all(
        each[1:] if w else each, [t] * size, g), True)  # fmt: skip
    return k


def attempt(call: Callable[[], Any]) -> Exception | None:
    try:
        work = call()
        if isinstance(work, dist.Work):
            work.wait()
    except Exception as error:
        return error
    return None


def run(check: Check, label: str, kind: Kind, odd: list[int], later: bool, group: Any) -> None:
    """One case: some ranks are wrong; then an operation that must be right."""
    rank, size = here()
    began = time.monotonic()
    error = attempt(lambda: kind.call(rank in odd, later, group))
    spent = time.monotonic() - began
    text = f"{type(error).__name__}: {error}"
    if rank in odd:
        check.that(isinstance(error, kind.error), f"{label}, here: {text}")
        check.that(not isinstance(error, dist.DistError), f"{label}, here: {text}")
    else:
        check.that(isinstance(error, dist.DistMismatchError), f"{label}, elsewhere: {text}")
        said = any(f"rank {r} refused its arguments: {kind.error.__name__}" in text for r in odd)
        said = said or all(str(r) in text for r in odd) and "refused" in text
        check.that(said, f"{label}, elsewhere: {text}")
    check.that(spent < AT_ONCE, f"{label}: {spent:.2f} s")
    total = torch.full((3,), rank + 1.0)
    after = attempt(lambda: dist.all_reduce(total, group=group))
    right = total.tolist() == [size * (size + 1) / 2] * 3
    check.that(after is None and right, f"after {label}: {after}, {total.tolist()}")


@pytest.fixture(params=["", "mpi"], ids=["shared memory", "MPI"])
def group(request):
    """A group whose ranks agree through the node's memory, or through MPI."""
    if request.param:
        os.environ["HPCDIST_CHECK_TRANSPORT"] = request.param
    try:
        made = dist.new_group()
    finally:
        os.environ.pop("HPCDIST_CHECK_TRANSPORT", None)
    return made


@pytest.mark.mpi(min_size=3)
def test_ranks_that_refuse_for_the_same_reason_are_all_named(group):
    rank, size = here()
    if rank == 0:
        time.sleep(0.3)  # all others have said why
    error = attempt(lambda: dist.all_reduce(torch.ones(4) if rank == 0 else [1], group=group))
    if rank == 0:
        refusal = getattr(error, "refusal", None)
        ranks = tuple(range(1, size))
        good = isinstance(error, dist.DistMismatchError) and refusal is not None
        good = good and refusal.ranks == ranks and refusal.reason.startswith("TypeError: ")
        named = f"ranks {', '.join(map(str, ranks))} refused their arguments: TypeError: "
        good = good and named in str(error) and refusal.reason in str(error)
    else:
        good = isinstance(error, TypeError)
    parallel_assert(good, lambda: repr(error))


def test_some_ranks_refuse_their_arguments(group, count):
    check, (rank, size) = Check(), here()
    cases = 0
    for number, (name, kind) in enumerate(kinds(rank, size).items()):
        one = number % size
        for odd in ([one], [r for r in range(size) if r != one]):
            for later in (False,) if kind.sync_only else (False, True):
                run(check, f"{name}, ranks {odd}, async {later}", kind, odd, later, group)
                cases += 1
    count(cases)
    check.done()


def test_all_ranks_refuse(group):
    """Nobody waits for anybody, and all are in step."""
    check, (rank, size) = Check(), here()
    for name, kind in kinds(rank, size).items():
        run(check, name, kind, list(range(size)), False, group)
    check.done()


def test_a_refusal_behind_queued_operations(group):
    """It takes its turn behind what is queued, and what is queued behind it is right."""
    check, (rank, size) = Check(), here()
    bad = torch.ones(8)[::2]
    for odd in range(size):
        tensors = [torch.full((1000,), rank + 1.0) for _ in range(6)]
        works = [dist.all_reduce(t, group=group, async_op=True) for t in tensors[:3]]
        error = attempt(
            lambda: dist.all_reduce(
                bad if rank == odd else torch.ones(4),  # noqa: B023
                group=group,
                async_op=True,
            )
        )
        works += [dist.all_reduce(t, group=group, async_op=True) for t in tensors[3:]]
        for work in works:
            check.that(attempt(work.wait) is None, f"rank {odd} refused: {work}")
        wanted = ValueError if rank == odd else dist.DistMismatchError
        check.that(isinstance(error, wanted), f"{odd}: {error}")
        total = size * (size + 1) / 2
        check.that(all(t.eq(total).all() for t in tensors), f"{odd}: wrong sums")
    check.done()


def test_refusals_one_after_another(group):
    """A rank that goes on refusing does not wait for the others, who come late to each.

    Through MPI few agreements can be under way at a time.
    """
    check, (rank, _) = Check(), here()
    bad = torch.ones(8)[::2]
    for odd in (0, 1):
        if rank != odd:
            time.sleep(0.3)
        began = time.monotonic()
        for _ in range(20 if group._comm.checks_through == "shared memory" else 2):
            error = attempt(
                lambda: dist.all_reduce(bad if rank == odd else torch.ones(4), group=group)  # noqa: B023
            )
            # of long ago the reason is not kept, only that it was refused
            wanted = ValueError if rank == odd else dist.DistMismatchError
            check.that(isinstance(error, wanted), f"{odd}: {error}")
            told = rank == odd or f"rank {odd} refused its arguments" in str(error)
            check.that(told, f"{odd}: {error}")
        spent = time.monotonic() - began
        check.that(rank != odd or spent < 0.25, f"the refusing rank waited for {spent:.2f} s")
        total = torch.ones(1)
        dist.all_reduce(total, group=group)
        check.that(total.item() == dist.get_world_size(), f"after {odd}: {total}")
    check.done()


def test_a_burst_in_flight_when_the_next_is_refused(group):
    """Whether the others begin the next burst shows only when this one has ended."""
    check, (rank, size) = Check(), here()
    comm = group._comm
    works: list[Any] = []
    try:
        with bursts(agreeing(comm), "bursts", lambda: [3, 3]):
            for _ in range(3 if rank else 1):
                works.append(comm.broadcast(torch.ones(2), 0, True))
            if not rank:
                works[0].wait()
                time.sleep(0.3)
            raise ZeroDivisionError("on purpose")
    except ZeroDivisionError:
        pass
    failed = [isinstance(attempt(work.wait), dist.DistError) for work in works]
    check.that(failed == [False, True, True][: len(works)], f"{failed}")
    total = torch.ones(1)
    error = attempt(lambda: dist.all_reduce(total, group=group))
    check.that(error is None and total.item() == size, f"{error!r}, {total}")
    check.done()


def test_what_tells_nobody():
    """No refusal in a group of one, or with the check off: nothing is begun."""
    check, (rank, _) = Check(), here()
    alone = dist.new_group([rank], use_local_synchronization=True)
    unchecked = dist.new_group()
    unchecked._comm.check = 0
    for group in (alone, unchecked):
        before = group._comm.seq
        error = attempt(lambda: dist.all_reduce(torch.ones(8)[::2], group=group))  # noqa: B023
        check.that(isinstance(error, ValueError), f"{error}")
        check.that(group._comm.seq == before, "something was begun")
    dist.destroy_process_group(alone)
    unchecked._comm.check = 1
    dist.destroy_process_group(unchecked)
    check.done()
