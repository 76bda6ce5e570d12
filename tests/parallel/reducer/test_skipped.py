"""skip_all_reduce_unused_params where the ranks do not leave out the same parameters."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from ddp_cases import DDP
from patience import at_most
from torch import nn

import hpcdist as dist
from hpcdist.parallel import comm_hooks as hooks
from hpcdist.testing import parallel_assert, parallel_raises

pytestmark = [pytest.mark.ranks, pytest.mark.mpi(min_size=2)]


def waiting(_state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A hook of a user's, which waits for the average at once."""
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    dist.all_reduce(bucket.buffer(), op=dist.ReduceOp.AVG)
    future.set_result(bucket.buffer())
    return future


class Compared:
    """A hook that is an object without a hash."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Compared)

    def __call__(self, state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        return waiting(state, bucket)


HOOKS = [hooks.allreduce_hook, waiting]


class Either(nn.Module):
    """Two parameters of one size, of which a call uses one, or none."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(count)), nn.Parameter(torch.ones(count))

    def forward(self, first: bool | None) -> torch.Tensor:
        if first is None:
            return torch.ones((), requires_grad=True) * 1
        return (2 * self.a).sum() if first else (10 * self.b).sum()


class Some(nn.Module):
    """Three parameters, of which a call uses some."""

    def __init__(self) -> None:
        super().__init__()
        self.each = nn.ParameterList(nn.Parameter(torch.ones(3)) for _ in range(3))

    def forward(self, used: tuple[int, ...]) -> torch.Tensor:
        if not used:
            return torch.ones((), requires_grad=True) * 1
        return torch.stack([self.each[place].sum() for place in used]).sum()


def make(cap: float | None, as_view: bool, count: int = 3) -> DDP:
    model = DDP(
        Either(count),
        find_unused_parameters=True,
        skip_all_reduce_unused_params=True,
        bucket_cap_mb=cap,
        gradient_as_bucket_view=as_view,
    )
    buckets = [bucket.members for bucket in model.reducer.buckets]
    parallel_assert(len(buckets) == (1 if cap is None else 2), str(buckets))
    return model


@pytest.mark.parametrize("as_view", [False, True], ids=["copies", "views"])
@pytest.mark.parametrize("cap", [1e-6, None], ids=["a bucket each", "one bucket"])
def test_ranks_that_use_different_ones(cap: float | None, as_view: bool) -> None:
    """Rank 0 averaged its parameter with another one of the others, or some got no gradient."""
    model = make(cap, as_view)
    with parallel_raises(dist.DistMismatchError):
        model(dist.get_rank() == 0).backward()


@pytest.mark.parametrize("used", [(0, 2), (0,)], ids=str)
@pytest.mark.parametrize("swapped", [False, True], ids=["few", "many"])
def test_the_group_is_in_step_after_different_numbers(used: tuple[int, ...], swapped: bool) -> None:
    """Those who reduced more buckets waited for the others until their timeout."""
    model = DDP(
        Some(),
        find_unused_parameters=True,
        skip_all_reduce_unused_params=True,
        bucket_cap_mb=1e-6,
    )
    with parallel_raises(dist.DistMismatchError):
        model((0, 1, 2) if swapped == (dist.get_rank() == 0) else used).backward()
    total = torch.ones(1)
    dist.all_reduce(total)
    parallel_assert(total.item() == dist.get_world_size(), f"{total}")


@pytest.mark.parametrize("passes", [0, 2], ids=["in the first pass", "later"])
@pytest.mark.parametrize("used", [(1, 2), (1,), (2,), ()], ids=str)
@pytest.mark.parametrize("swapped", [False, True], ids=["few", "many"])
def test_a_rank_that_leaves_out_the_last_bucket_alone(
    used: tuple[int, ...], swapped: bool, passes: int
) -> None:
    """It ended its pass well, and the others met its next call."""
    model = DDP(
        Some(),
        find_unused_parameters=True,
        skip_all_reduce_unused_params=True,
        bucket_cap_mb=1e-6,
    )
    for _ in range(passes):
        model((1, 2)).backward()
    with parallel_raises(dist.DistMismatchError, match="skip_all_reduce_unused_params"):
        model((0, 1, 2) if swapped == (dist.get_rank() == 0) else used).backward()
    total = torch.ones(1)
    dist.all_reduce(total)
    parallel_assert(total.item() == dist.get_world_size(), f"{total}")


@pytest.mark.parametrize("as_view", [False, True], ids=["copies", "views"])
@pytest.mark.parametrize("static", [False, True], ids=["", "static graph"])
def test_ranks_that_leave_out_the_same_last_bucket(static: bool, as_view: bool) -> None:
    """A call takes its place, and none is added where the last bucket is reduced."""
    model = DDP(
        Some(),
        find_unused_parameters=not static,
        static_graph=static,
        skip_all_reduce_unused_params=True,
        bucket_cap_mb=1e-6,
        gradient_as_bucket_view=as_view,
    )
    for used in [(1, 2)] * 3 if static else [(1, 2), (2,), (1,), (), (0,), (0, 2), (0, 1, 2)]:
        model.zero_grad()
        loss = model(used)
        before = dist.group.WORLD.carrier.seq
        loss.backward()
        calls = dist.group.WORLD.carrier.seq - before
        expected = len(used) + (0 not in used)
        parallel_assert(calls == expected, f"{calls} calls, not {expected}, with {used}")
        for place, parameter in enumerate(model.module.each):
            found = None if parameter.grad is None else parameter.grad.tolist()
            parallel_assert(found == ([1.0] * 3 if place in used else None), f"{place}: {found}")


@pytest.mark.parametrize("count", [3, 1 << 19], ids=["short", "long"])
def test_the_error_tells_that_parameters_are_left_out(count: int) -> None:
    """That of a gradient which is averaged where it lies did not."""
    model = make(1e-6, False, count)
    with parallel_raises(dist.DistMismatchError, match="with skip_all_reduce_unused_params"):
        model(dist.get_rank() == 0).backward()


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("passes", [0, 2], ids=["in the first pass", "later"])
@pytest.mark.parametrize("cap", [1e-6, None], ids=["a bucket each", "one bucket"])
@pytest.mark.parametrize("others", [False, None], ids=["another one", "none"])
def test_ranks_that_use_different_ones_with_a_hook(
    others: bool | None, cap: float | None, passes: int, hook: Any
) -> None:
    """Each averaged its own with another one of the others, and all took that for the average."""
    model = make(cap, False)
    model.register_comm_hook(None, hook)
    for _ in range(passes):
        model(True).backward()
    with parallel_raises(dist.DistMismatchError):
        model(True if dist.get_rank() == 0 else others).backward()


@pytest.mark.parametrize("hook", [None, *HOOKS, Compared()])
@pytest.mark.parametrize("cap", [1e-6, None], ids=["a bucket each", "one bucket"])
def test_ranks_that_use_the_same_one_in_turn(cap: float | None, hook: Any) -> None:
    model = make(cap, False)
    if hook is not None:
        model.register_comm_hook(None, hook)
    for first, value in ((True, 2.0), (False, 10.0), (None, 0.0), (True, 2.0)):
        model.zero_grad()
        model(first).backward()
        parameters = [model.module.a, model.module.b]
        if first is not None:
            used = parameters.pop(0 if first else 1).grad
            parallel_assert(used is not None and bool((used == value).all()), f"{used}")
        for unused in parameters:
            parallel_assert(unused.grad is None, f"{unused.grad}")
    dist.barrier()


def some(state: Any, hook: Any) -> DDP:
    model = DDP(
        Some(),
        find_unused_parameters=True,
        skip_all_reduce_unused_params=True,
        bucket_cap_mb=1e-6,
    )
    model.register_comm_hook(state, hook)
    return model


def fails_at_once(model: DDP, used: tuple[int, ...]) -> None:
    """All ranks learn in this pass that they use others, and none waits for its timeout."""
    began = time.monotonic()
    with parallel_raises(dist.DistMismatchError):
        model(used).backward()
    seconds = time.monotonic() - began
    parallel_assert(seconds < at_most(3), f"{seconds} s")


@pytest.mark.parametrize("used", [(1, 2), (0, 1, 2)], ids=str)
def test_a_rank_that_leaves_out_everything_in_the_first_local_pass(used: tuple[int, ...]) -> None:
    """It waited for the others, which went on alone, until its timeout."""
    state = hooks.PostLocalSGDState(None, None, 2, post_local_gradient_allreduce=False)
    model = some(state, hooks.post_localSGD_hook)
    for _ in range(2):
        model(used).backward()
    before = dist.group.WORLD.carrier.seq
    for _ in range(2):
        model(() if dist.get_rank() == 0 else used).backward()
    calls = dist.group.WORLD.carrier.seq - before
    parallel_assert(calls == 0, f"{calls} calls of passes that are local")


@pytest.mark.parametrize("used", [(1, 2), (1,), (0, 1, 2)], ids=str)
@pytest.mark.parametrize("left", [(), (2,)], ids=str)
def test_ranks_that_leave_out_different_ones_in_a_small_group(
    left: tuple[int, ...], used: tuple[int, ...]
) -> None:
    """A rank's next pass took part in the averages of the others' last one."""
    group = dist.new_group()
    state = hooks.PostLocalSGDState(None, group, 1)
    model = some(state, hooks.post_localSGD_hook)
    for _ in range(3):
        model(used).backward()
    fails_at_once(model, left if dist.get_rank() == 0 else used)
    total = torch.ones(1)
    dist.all_reduce(total, group=group)
    parallel_assert(total.item() == dist.get_world_size(), f"{total}")


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("before", [(1,), (), (0, 1, 2)], ids=str)
@pytest.mark.parametrize("left", [(), (2,)], ids=str)
def test_ranks_that_use_more_than_before_with_a_hook(
    left: tuple[int, ...], before: tuple[int, ...], hook: Any
) -> None:
    """Those that left buckets out made fewer calls than the others were in."""
    model = some(None, hook)
    for _ in range(2):
        model(before).backward()
    fails_at_once(model, left if dist.get_rank() == 0 else (0, 1, 2))
    total = torch.ones(1)
    dist.all_reduce(total)
    parallel_assert(total.item() == dist.get_world_size(), f"{total}")


@pytest.mark.parametrize("starts", [False, True], ids=["that stops", "that begins"])
def test_a_rank_that_leaves_out_everything_with_a_hook(starts: bool) -> None:
    """The hook calls something in some passes only, and that rank cannot see in which."""

    def turns(state: dict[str, bool], bucket: Any) -> torch.futures.Future[torch.Tensor]:
        if state["calls"]:
            return waiting(state, bucket)
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    state = {"calls": not starts}
    model = some(state, turns)
    for _ in range(2):
        model((1, 2)).backward()
    state["calls"] = starts
    with parallel_raises(dist.DistMismatchError):
        model(() if dist.get_rank() == 0 else (1, 2)).backward()
