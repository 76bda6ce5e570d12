"""Communication hooks that fail on one rank: an error on all, soon, and all stay in step."""

from __future__ import annotations

import time
from contextlib import suppress
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lateness import once_others_have_ended
from torch import nn

import hpcdist as dist
from hpcdist.parallel import comm_hooks
from hpcdist.testing import parallel_assert, parallel_raises

pytestmark = pytest.mark.ranks

SIZES = [(30, 40), (40, 50), (50, 60)]


class Boom(Exception):
    """What a hook raises."""


def bucketed(group: dist.ProcessGroup | None = None, **options) -> dist.DistributedDataParallel:
    """A model with a bucket for each of its parameters."""
    layers = nn.Sequential(*(nn.Linear(*each, bias=False) for each in SIZES))
    return dist.DistributedDataParallel(layers, process_group=group, bucket_cap_mb=0, **options)


def done(bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """What a hook returns that has waited for the average."""
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def end_in_step(group: dist.ProcessGroup) -> None:
    """Destroy the group, in which all ranks are in step."""
    total = torch.ones(1)
    dist.all_reduce(total, group=group)
    parallel_assert(float(total) == group.size(), f"{total}")
    dist.destroy_process_group(group)


def fail(_gradient: torch.Tensor) -> None:
    raise Boom


def hears_of_it(loss: torch.Tensor) -> bool:
    """Whether this rank's backward raises, soon; then all ranks are in step."""
    dist.barrier()
    began = time.monotonic()
    with suppress(Boom, dist.DistMismatchError):
        heard = True
        loss.backward()
        heard = False
    took = time.monotonic() - began
    for _ in range(3):
        total = torch.ones(1)
        dist.all_reduce(total)
        parallel_assert(float(total) == dist.get_world_size(), f"{total}")
    parallel_assert(took < 5, f"{took:.1f} s")
    return heard


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("name", ["plain", "power", "noop"])
@pytest.mark.parametrize("at", [0, 1, 2])
def test_an_exception_in_a_hook_keeps_all_in_step(name: str, at: int) -> None:
    """Whether a hook makes a call for each bucket, two that depend on each other, or none."""
    state, model = None, bucketed()
    x, fails, last = torch.ones(2, 30), [], dist.get_rank() == dist.get_world_size() - 1
    inner = {
        "plain": comm_hooks.allreduce_hook,
        "noop": comm_hooks.noop_hook,
        "power": comm_hooks.powerSGD_hook,
    }[name]
    if name == "power":
        state = comm_hooks.PowerSGDState(None, start_powerSGD_iter=2)

    def hook(state, bucket):
        if fails and bucket.index() == at:
            raise Boom
        return inner(state, bucket)

    model.register_comm_hook(state, hook)
    for _ in range(4):
        model(x).sum().backward()
    fails += [at] if last else []
    loss = model(x).sum()
    heard = hears_of_it(loss)
    parallel_assert(heard == (last or name != "noop"), f"{heard}")


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize("name", ["noop", "plain", "fp16", "after a hook"])
def test_an_exception_in_a_hook_in_its_first_pass(name: str, at: int, everywhere: bool) -> None:
    """Nobody knows yet whether the hook calls any collective."""
    group = dist.new_group(timeout=timedelta(seconds=5))
    model = bucketed(group)
    x, last = torch.ones(2, 30), dist.get_rank() == dist.get_world_size() - 1
    fails = [at] if last or everywhere else []
    inner = comm_hooks.noop_hook if name == "noop" else comm_hooks.allreduce_hook

    def hook(state, bucket):
        if bucket.index() in fails:
            raise Boom("of the hook")
        return inner(group, bucket)

    if name == "fp16":
        hook = comm_hooks.fp16_compress_wrapper(hook)
    elif name == "after a hook":
        sgd = SimpleNamespace(step_param=lambda parameter, gradient: None)
        hook = comm_hooks.hook_then_optimizer(hook, comm_hooks.OptimizerHookState(sgd))
    model.register_comm_hook(None, hook)
    heard = []
    for _ in range(3):
        try:
            model(x).sum().backward()
        except (Boom, dist.DistError) as error:
            heard.append(f"{type(error).__name__}: {error}")
        fails.clear()
    if last or everywhere:
        parallel_assert(heard[0] == "Boom: of the hook", f"{heard}")
    else:
        parallel_assert("DistMismatchError" in heard[0], f"{heard}")
    parallel_assert(len(heard) == (1 if everywhere else 3), f"{heard}")
    end_in_step(group)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("name", ["static_graph", "find_unused_parameters"])
@pytest.mark.parametrize("passes", [0, 2])
def test_an_exception_in_a_hook_at_the_end_of_backward(name: str, passes: int) -> None:
    """Buckets may start only there: in a static graph's first pass, and with unused parameters."""
    layers = nn.ModuleList(nn.Linear(*each, bias=False) for each in SIZES)
    model = dist.DistributedDataParallel(layers, bucket_cap_mb=0, **{name: True})
    model.module.forward = lambda x: layers[1](layers[0](x)).sum()  # the last one is unused
    x, fails, last = torch.ones(2, 30), [], dist.get_rank() == dist.get_world_size() - 1

    def hook(state, bucket):
        if fails:
            raise Boom
        return comm_hooks.allreduce_hook(state, bucket)

    model.register_comm_hook(None, hook)
    for _ in range(passes):
        model(x).backward()
    fails += [1] if last else []
    loss = model(x)
    parallel_assert(hears_of_it(loss))


def wrong(what: str, future: torch.futures.Future) -> torch.futures.Future:
    """What a hook returns in place of the average."""

    def then(done):
        (total,) = done.value()
        if what == "callback raises":
            raise Boom
        return total[:-1]

    if what == "hook raises":
        raise Boom
    return torch.futures.Future() if what == "never ends" else future.then(then)


def failing_model(
    group: dist.ProcessGroup, what: str, fails: list[int], everywhere: bool = False, **options
) -> dist.DistributedDataParallel:
    """A model whose hook averages, but for a bucket in `fails` on the last rank, or on all."""
    model = bucketed(group, **options)
    last = group.rank() == group.size() - 1

    def hook(state, bucket):
        average = bucket.buffer().div_(group.size())
        future = dist.all_reduce(average, group=group, async_op=True).get_future()
        if (last or everywhere) and bucket.index() in fails:
            return wrong(what, future)
        return future.then(lambda done: done.value()[0])

    model.register_comm_hook(None, hook)
    return model


def all_hear(group: dist.ProcessGroup, heard: str) -> None:
    """All ranks have raised, the others because of the last one; and they are in step."""
    last = group.size() - 1
    parallel_assert(heard != "", "the other ranks go on")
    parallel_assert(group.rank() == last or f"rank {last}" in heard, heard)
    end_in_step(group)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("what", ["callback raises", "is short", "never ends"])
@pytest.mark.parametrize("passes", [0, 2])
def test_a_future_that_fails_on_one_rank_is_an_error_on_all(what: str, passes: int) -> None:
    """The operations behind it succeed on all ranks, so nothing else would tell the others."""
    group = dist.new_group(timeout=timedelta(seconds=1.5))
    fails: list[int] = []
    model = failing_model(group, what, fails)
    x = torch.ones(2, 30)
    for _ in range(passes):
        model(x).sum().backward()
    fails.append(1)
    loss = model(x).sum()
    heard = ""
    try:
        loss.backward()
    except Exception as error:
        heard = f"{type(error).__name__}: {error}"
    all_hear(group, heard)


@pytest.mark.mpi(min_size=2)
def test_a_future_that_fails_on_a_rank_that_is_done_is_an_error_on_all() -> None:
    """It shadows the others' backward with zeros, and calls the hook as they do."""
    group = dist.new_group(timeout=timedelta(seconds=1.5))
    fails: list[int] = []
    model = failing_model(group, "callback raises", fails)
    done = group.rank() == group.size() - 1
    heard = ""
    try:
        with model.join():
            for step in range(1 if done else 3):
                model(torch.ones(2, 30)).sum().backward()
                fails += [1] if step == 0 else []
    except Exception as error:
        heard = f"{type(error).__name__}: {error}"
    all_hear(group, heard)


def test_a_hook_that_returns_a_work_is_told_to_return_its_future() -> None:
    model = bucketed()
    model.register_comm_hook(
        None, lambda _, bucket: dist.all_reduce(bucket.buffer(), async_op=True)
    )
    loss = model(torch.ones(2, 30)).sum()
    with parallel_raises(TypeError, match=r"not Work: return its get_future\(\)"):
        loss.backward()
    for _ in range(len(SIZES)):  # what follows is in step
        total = torch.ones(1)
        dist.all_reduce(total)
        parallel_assert(float(total) == dist.get_world_size(), f"{total}")


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("passes", [0, 1])
def test_a_hook_of_one_call_a_pass_fails_on_one_rank(passes: int) -> None:
    """In the first pass DDP takes it for one of a call for each bucket."""
    group = dist.new_group(timeout=timedelta(seconds=20))
    model = bucketed(group)
    last, fails = group.rank() == group.size() - 1, []

    def hook(state, bucket):
        if not bucket.is_last():
            return done(bucket)
        future = dist.all_reduce(bucket.buffer(), group=group, async_op=True).get_future()
        if last and fails:
            return wrong("callback raises", future)
        return future.then(lambda done: done.value()[0])

    model.register_comm_hook(None, hook)
    for _ in range(passes):
        model(torch.ones(2, 30)).sum().backward()
    fails.append(1)
    loss, began, heard = model(torch.ones(2, 30)).sum(), time.monotonic(), False
    with suppress(Exception):
        heard = True
        loss.backward()
        heard = False
    parallel_assert(heard and time.monotonic() - began < 10)
    for _ in range(3):
        total = torch.ones(1)
        dist.all_reduce(total, group=group)
        parallel_assert(float(total) == group.size(), f"{total}")
    dist.destroy_process_group(group)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize("what", ["hook raises", "gradient hook raises"])
@pytest.mark.parametrize("unused", [False, True])
def test_an_exception_when_all_averages_are_under_way(
    what: str, everywhere: bool, unused: bool
) -> None:
    """The program catches it, and goes on to the next forward.

    On one rank: all raise, with that forward. On all: nothing is lost.
    """
    group = dist.new_group(timeout=timedelta(seconds=20))
    fails: list[int] = []
    model = failing_model(group, what, fails, everywhere, find_unused_parameters=unused)
    x = torch.ones(2, 30, requires_grad=True)
    model(x).sum().backward()
    raises = everywhere or group.rank() == group.size() - 1
    if what == "hook raises":
        fails.append(2)  # the last bucket
    elif raises:
        x.register_hook(fail)
    dist.barrier()
    began, errors = time.monotonic(), []
    for _ in range(2):
        try:
            model(x if raises and not errors else torch.ones(2, 30)).sum().backward()
        except Exception as error:
            errors.append(type(error).__name__)
            fails.clear()
    took = time.monotonic() - began
    good = errors == ["Boom"] if everywhere else len(errors) == 2
    parallel_assert(good and took < 10, f"{errors} after {took:.1f} s")
    end_in_step(group)


@pytest.mark.mpi(min_size=2)
def test_a_late_rank_is_named_where_a_hook_returns_a_future_of_its_own() -> None:
    """The operation behind the future has the same time, and says more."""
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.new_group()
    model = dist.DistributedDataParallel(nn.Linear(30, 40), process_group=group)

    def hook(state, bucket):
        work = dist.all_reduce(bucket.buffer().div_(size), group=group, async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    model.register_comm_hook(None, hook)
    model(torch.ones(2, 30)).sum().backward()
    loss = model(torch.ones(2, 30)).sum()
    dist.barrier()
    group.timeout = timedelta(seconds=0.5)
    heard = ""
    with once_others_have_ended(size - 1):
        try:
            loss.backward()
        except Exception as error:
            heard = str(error)
    parallel_assert(rank == size - 1 or f"rank {size - 1}" in heard, heard)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize("before", [False, True], ids=["after its average", "before it"])
def test_no_rank_goes_on_where_a_hook_that_waits_fails_on_one(at: int, before: bool) -> None:
    """The others learn of it in their own calls of the hook; the program catches all errors."""
    group = dist.new_group(timeout=timedelta(seconds=20))
    model = bucketed(group)
    last, fails = group.rank() == group.size() - 1, []

    def hook(state, bucket):
        raises = last and bucket.index() in fails
        if raises and before:
            raise Boom
        dist.all_reduce(bucket.buffer().div_(group.size()), group=group)
        if raises:
            raise Boom
        return done(bucket)

    model.register_comm_hook(None, hook)
    x = torch.ones(2, 30)
    model(x).sum().backward()
    fails.append(at)
    began, errors = time.monotonic(), []
    for _ in range(2):
        try:
            model(x).sum().backward()
        except (Boom, dist.DistError) as error:
            errors.append(str(error))
        fails.clear()
    took = time.monotonic() - began
    parallel_assert(len(errors) == 2 and took < 10, lambda: f"{errors} after {took:.1f} s")
    end_in_step(group)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("how", ["refused", "different"])
def test_ranks_go_on_after_a_call_of_a_hook_that_moved_nothing(how: str) -> None:
    """One rank's arguments are refused, or all ranks' differ: nobody has gone further."""
    group = dist.new_group(timeout=timedelta(seconds=20))
    model = bucketed(group)
    rank, fails = group.rank(), []

    def hook(state, bucket):
        if bucket.index() in fails:
            text: Any = "no tensor"
            refused = text if rank == 0 else torch.ones(3)
            dist.all_reduce(refused if how == "refused" else torch.ones(3 + rank), group=group)
        dist.all_reduce(bucket.buffer().div_(group.size()), group=group)
        return done(bucket)

    model.register_comm_hook(None, hook)
    began, ended = time.monotonic(), []
    for index in range(4):
        fails[:] = [1] if index == 1 else []
        try:
            model(torch.ones(2, 30)).sum().backward()
        except (TypeError, dist.DistError) as error:
            ended.append(str(error))
        else:
            ended.append("")
    took = time.monotonic() - began
    parallel_assert(
        not ended[0] and ended[1] and ended[2:] == [""] * 2 and took < 10,
        lambda: f"{ended} after {took:.1f} s",
    )
    dist.destroy_process_group(group)
