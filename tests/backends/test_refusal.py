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
from lateness import hear, tell_all

import hpcdist as dist
import hpcdist.nn.functional
from hpcdist import ReduceOp
from hpcdist.backends.dispatch import agreeing
from hpcdist.backends.refusal import refusing_batches
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
    return {
        **refused_sizes(size),
        **refused_tensors(rank),
        **refused_lists(rank, size),
        **refused_settings(size),
    }


def refused_sizes(size: int) -> dict[str, Kind]:
    """Tensors that do not fit each other."""
    t, flat, each = torch.ones(4), torch.empty(4 * size), [torch.empty(4) for _ in range(size)]
    ones, SUM = torch.ones, ReduceOp.SUM
    return {
        "sizes of all_gather_into_tensor": Kind(
            lambda w, a, g: dist.all_gather_into_tensor(flat, ones(5) if w else t, g, a), ValueError
        ),
        "sizes of reduce_scatter_tensor": Kind(
            lambda w, a, g: dist.reduce_scatter_tensor(ones(5 if w else 4), flat, SUM, g, a),
            ValueError,
        ),
        "own place": Kind(
            lambda w, a, g: dist.all_gather(each, ones(3) if w else t, g, a), ValueError
        ),
        "dtypes in a list": Kind(
            lambda w, a, g: dist.all_reduce_coalesced(
                [t, t.double() if w else t.clone()], SUM, g, a
            ),
            TypeError,
        ),
        "complex among real": Kind(
            lambda w, a, g: dist.all_reduce_coalesced(
                [t, t.to(torch.cfloat) if w else t.clone()], ReduceOp.MAX, g, a
            ),
            TypeError,
        ),
        "splits": Kind(
            lambda w, a, g: dist.all_to_all_single(
                torch.empty(size), ones(size), [2] * size if w else None, None, g, a
            ),
            ValueError,
        ),
        "outputs that overlap": Kind(
            lambda w, a, g: dist.all_gather([flat[:4]] * size if w else each, t, g, a), ValueError
        ),
    }


def refused_tensors(rank: int) -> dict[str, Kind]:
    """What no operation takes, or not this one."""
    t, SUM = torch.ones(4), ReduceOp.SUM

    def read_only_or_gaps() -> Any:
        return read_only() if rank == 0 else torch.ones(3)[::2]

    def reduced(make: Callable[[], Any], op: Any = SUM) -> Callable[..., Any]:
        return lambda w, a, g: dist.all_reduce(make() if w else t, op, g, a)

    return {
        "gaps": Kind(reduced(lambda: torch.ones(8)[::2]), ValueError),
        "no tensor": Kind(lambda w, a, g: dist.broadcast(None if w else t, 0, g, a), TypeError),
        "read-only": Kind(reduced(read_only), ValueError),
        "one of two": Kind(
            lambda w, a, g: dist.reduce(read_only_or_gaps() if w else t, 0, SUM, g, a), ValueError
        ),
        "freed memory": Kind(reduced(freed), TypeError),
        "sparse with MAX": Kind(reduced(t.to_sparse, ReduceOp.MAX), ValueError),
    }


def refused_lists(rank: int, size: int) -> dict[str, Kind]:
    """Lists of another length, on another rank, or none."""
    t, each = torch.ones(4), [torch.empty(4) for _ in range(size)]
    return {
        "list too short": Kind(
            lambda w, a, g: dist.all_gather(each[1:] if w else each, t, g, a), ValueError
        ),
        "gather_list": Kind(
            lambda w, a, g: dist.gather(t, each if w != (rank == 0) else None, 0, g, a), ValueError
        ),
        "scatter_list": Kind(
            lambda w, a, g: dist.scatter(
                torch.empty(4), each if w != (rank == 0) else None, 0, g, a
            ),
            ValueError,
        ),
        "list of all_to_all": Kind(
            lambda w, a, g: dist.all_to_all(each[:1] * (size + 1) if w else each, [t] * size, g, a),
            ValueError,
        ),
        "list of objects": Kind(
            lambda w, a, g: dist.all_gather_object(() if w else [None] * size, 1, g),
            TypeError,
            sync_only=True,
        ),
        "differentiable": Kind(
            lambda w, a, g: dist.nn.functional.all_to_all(each[1:] if w else each, [t] * size, g),
            ValueError,
            sync_only=True,
        ),
    }


def refused_settings(size: int) -> dict[str, Kind]:
    """Roots, operations and devices."""
    t, each, SUM = torch.ones(4), [torch.empty(4) for _ in range(size)], ReduceOp.SUM
    return {
        "root outside": Kind(lambda w, a, g: dist.broadcast(t, 99 if w else 0, g, a), ValueError),
        "no root": Kind(lambda w, a, g: dist.reduce(t, None if w else 0, SUM, g, a), ValueError),
        "reduce-op": Kind(
            lambda w, a, g: dist.all_reduce(t, ReduceOp.BXOR if w else SUM, g, a), TypeError
        ),
        "no reduce-op": Kind(
            lambda w, a, g: dist.reduce_scatter(torch.empty(4), each, None if w else SUM, g, a),
            TypeError,
        ),
        "device_ids": Kind(
            lambda w, a, g: dist.barrier(g, a, device_ids=3 if w else None), TypeError
        ),
        "root of objects": Kind(
            lambda w, a, g: dist.broadcast_object_list([1], 99 if w else 0, g),
            ValueError,
            sync_only=True,
        ),
    }


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
    done = torch.zeros(1)
    if rank == 0:
        for other in range(1, size):
            dist.recv(done, other)
    error = attempt(lambda: dist.all_reduce(torch.ones(4) if rank == 0 else [1], group=group))
    if rank:
        dist.send(done, 0)
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
    """A rank that goes on refusing does not wait for the others, who begin when it has ended.

    Through MPI few agreements can be under way at a time.
    """
    check, (rank, _) = Check(), here()
    bad = torch.ones(8)[::2]
    for odd in (0, 1):
        if rank != odd:
            hear(odd)
        for _ in range(20 if group.carrier.checks_through == "shared memory" else 2):
            error = attempt(
                lambda: dist.all_reduce(bad if rank == odd else torch.ones(4), group=group)  # noqa: B023
            )
            # of long ago the reason is not kept, only that it was refused
            wanted = ValueError if rank == odd else dist.DistMismatchError
            check.that(isinstance(error, wanted), f"{odd}: {error}")
            told = rank == odd or f"rank {odd} refused its arguments" in str(error)
            check.that(told, f"{odd}: {error}")
        if rank == odd:
            tell_all()
        total = torch.ones(1)
        dist.all_reduce(total, group=group)
        check.that(total.item() == dist.get_world_size(), f"after {odd}: {total}")
    check.done()


def test_a_burst_in_flight_when_the_next_is_refused(group):
    """Whether the others begin the next burst shows only when this one has ended."""
    check, (rank, size) = Check(), here()
    comm = group.carrier
    works: list[Any] = []
    try:
        with refusing_batches(agreeing(comm), "bursts", lambda: [3, 3]):
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
    unchecked.carrier.check = 0
    for group in (alone, unchecked):
        before = group.carrier.seq
        error = attempt(lambda: dist.all_reduce(torch.ones(8)[::2], group=group))  # noqa: B023
        check.that(isinstance(error, ValueError), f"{error}")
        check.that(group.carrier.seq == before, "something was begun")
    dist.destroy_process_group(alone)
    unchecked.carrier.check = 1
    dist.destroy_process_group(unchecked)
    check.done()
