"""Backward passes that an exception ends on all ranks: what hooks have begun is dropped there."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import pytest
import torch
from ddp_cases import DDP, distance, mine
from torch import nn

import hpcdist as dist
from hpcdist.optim import ZeroRedundancyOptimizer
from hpcdist.parallel import comm_hooks as hooks
from hpcdist.testing import parallel_assert, parallel_raises

pytestmark = pytest.mark.ranks


def net(seed: int = 3, width: int = 5) -> nn.Sequential:
    torch.manual_seed(seed)
    middle = nn.Linear(width, width)
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), middle, nn.Linear(width, 2))


def batches(steps: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randn(12, 4, generator=generator) for _ in range(steps)]


class Boom(Exception):
    """What a gradient's hook raises."""


def fail(_gradient: torch.Tensor) -> None:
    raise Boom


@contextmanager
def failing(layer: nn.Module) -> Iterator[None]:
    """Let backward raise at a layer, as a guard against NaN would."""
    handle = layer.weight.register_hook(fail)  # type: ignore[union-attr]
    with suppress(Boom, dist.DistMismatchError):
        yield
    handle.remove()


def backward(model: nn.Module, x: torch.Tensor) -> None:
    model.zero_grad()
    model(mine(x)).square().mean().backward()


def everywhere(model: nn.Module) -> bool:
    """Whether all ranks have the same parameters."""
    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    first = flat.clone()
    dist.broadcast(first, 0)
    return bool(torch.equal(first, flat))


class Descend:
    """Steps one parameter."""

    def __init__(self, **settings: Any) -> None:
        self.settings = {"lr": 0.1, **settings}
        self.optimizers: dict[torch.Tensor, torch.optim.Optimizer] = {}

    def step_param(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        if parameter not in self.optimizers:
            self.optimizers[parameter] = torch.optim.SGD([parameter], **self.settings)
        before, parameter.grad = parameter.grad, gradient
        self.optimizers[parameter].step()
        parameter.grad = before


def stepping(kind: str, module: nn.Module, settings: Any = None, **options: Any) -> DDP:
    """A model whose hook steps it with SGD."""
    model = DDP(module, bucket_cap_mb=0, **options)
    settings = {"lr": 0.1, **(settings or {})}
    state, hook = None, hooks.allreduce_hook
    if kind == "after a hook":
        hook = hooks.hook_then_optimizer(hook, hooks.OptimizerHookState(Descend(**settings)))
    elif kind == "in backward":
        state = hooks.OptimizerInBackward(torch.optim.SGD, model.parameters(), **settings)
        hook = hooks.optimizer_in_backward_hook
    else:
        zero = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.SGD, overlap_with_ddp=True, **settings
        )
        wrap = hooks.hook_with_zero_step
        if kind == "ZeRO, interleaved":
            wrap = hooks.hook_with_zero_step_interleaved
        hook = wrap(hook, model, zero)
    model.register_comm_hook(state, hook)
    return model


STEPPING = ["ZeRO", "ZeRO, interleaved", "after a hook", "in backward"]


@pytest.mark.parametrize("kind", STEPPING)
def test_a_pass_that_is_given_up_leaves_the_ranks_equal(kind: str) -> None:
    """A hook that steps after backward does not step; one that steps in it does so on all ranks."""
    model, reference = stepping(kind, net()), DDP(net())
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    data = batches(6)
    for step, x in enumerate(data):
        if step in (2, 4):
            with failing(model.module[0]):
                backward(model, x)
        model.zero_grad()
        loss = model(mine(x)).square().mean()  # forward ends what was given up
        parallel_assert(everywhere(model), f"{kind}: ranks differ before step {step}")
        if kind in ("ZeRO", "after a hook"):
            parallel_assert(distance(model, reference) <= 1e-6, f"{kind}: it stepped")
        else:  # these step while backward goes on
            for one, other in zip(reference.parameters(), model.parameters(), strict=True):
                one.data.copy_(other.data)
        loss.backward()
        backward(reference, x)
        optimizer.step()
        off = distance(model, reference)
        parallel_assert(off <= 1e-6, f"{kind}: off by {off} after step {step}")
        parallel_assert(everywhere(model), f"{kind}: ranks differ after step {step}")


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("kind", ["PowerSGD", "batched PowerSGD", "after PowerSGD", "ZeRO"])
def test_ranks_that_give_up_at_different_buckets_stay_in_step(kind: str) -> None:
    """What is owed for the rest of the pass is paid once: no second collective follows."""
    model = DDP(net(width=12), bucket_cap_mb=0)
    state: Any = hooks.PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=0.1)
    hook: Any = hooks.powerSGD_hook
    if kind == "batched PowerSGD":
        hook = hooks.batched_powerSGD_hook
    elif kind == "after PowerSGD":
        hook = hooks.hook_then_optimizer(hook, hooks.OptimizerHookState(Descend()))
    elif kind == "ZeRO":
        zero = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.1
        )
        state, hook = None, hooks.hook_with_zero_step(hooks.allreduce_hook, model, zero)
    model.register_comm_hook(state, hook)
    x = batches(1)[0]
    for _ in range(5):
        backward(model, x)
    last = dist.get_rank() == dist.get_world_size() - 1
    with failing(model.module[2 if last else 0]):
        backward(model, x)
    began = time.monotonic()
    with suppress(dist.DistError):  # of those that were in an average
        model(mine(x))
    took = time.monotonic() - began
    calls: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(calls, dist.group.WORLD.carrier.seq)
    parallel_assert(len(set(calls)) == 1, f"calls of the ranks: {calls}")
    parallel_assert(took < 5, f"{took:.1f} s")


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("kind", ["PowerSGD", "batched PowerSGD", "post-local"])
def test_only_steps_that_were_averaged_are_counted(kind: str) -> None:
    """One rank has started all buckets of a pass that is given up, the others have not."""
    state: Any = hooks.PowerSGDState(None, start_powerSGD_iter=4)
    hook: Any = hooks.batched_powerSGD_hook
    if kind == "post-local":
        state, hook = hooks.PostLocalSGDState(None, None, 4), hooks.post_localSGD_hook
    elif kind == "PowerSGD":
        hook = hooks.powerSGD_hook
    model = DDP(net(), bucket_cap_mb=0)
    model.register_comm_hook(state, hook)
    x = batches(1)[0]
    for _ in range(3):
        backward(model, x)
    parallel_assert(state.iter == 3, f"{state.iter}")
    leaf = torch.ones(1, requires_grad=True)
    with suppress(Boom, dist.DistMismatchError):
        if dist.get_rank() == 0:
            leaf.register_hook(fail)  # the last that backward comes to
            model(mine(x) * leaf).sum().backward()
        else:
            with failing(model.module[0]):
                backward(model, x)
    with suppress(dist.DistError):
        model(mine(x))
    parallel_assert(state.iter == 3, f"{state.iter}")


class Part(nn.Module):
    """Leaves a layer out, on all ranks."""

    def __init__(self, out: int) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.out: int | None = out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for place, layer in enumerate(self.layers):
            if place != self.out:
                x = layer(x)
        return x


@pytest.mark.parametrize("kind", STEPPING)
@pytest.mark.parametrize("out", [0, 2], ids=["without the last bucket", "without the first"])
def test_buckets_that_are_left_out(kind: str, out: int) -> None:
    options = {"find_unused_parameters": True, "skip_all_reduce_unused_params": True}
    model = stepping(kind, Part(out), **options)
    reference = DDP(Part(out), **options)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    for step, x in enumerate(batches(4)):
        if kind != "in backward":  # it leaves no gradients
            model.zero_grad()
        model(mine(x)).square().mean().backward()
        backward(reference, x)
        optimizer.step()
        off = distance(model, reference)
        parallel_assert(off <= 1e-6, f"{kind}: off by {off} after step {step}")
        parallel_assert(everywhere(model), f"{kind}: ranks differ after step {step}")


@pytest.mark.parametrize("join", [False, True], ids=["", "join"])
@pytest.mark.parametrize("out", [0, 2], ids=["without the last bucket", "without the first"])
@pytest.mark.parametrize("kind", ["PowerSGD", "batched PowerSGD", "post-local"])
def test_steps_without_some_buckets_are_counted(kind: str, out: int, join: bool) -> None:
    state: Any = hooks.PowerSGDState(None, start_powerSGD_iter=3)
    hook: Any = hooks.powerSGD_hook if kind == "PowerSGD" else hooks.batched_powerSGD_hook
    if kind == "post-local":
        state, hook = hooks.PostLocalSGDState(None, None, 6), hooks.post_localSGD_hook
    options = {"find_unused_parameters": True, "skip_all_reduce_unused_params": True}
    model = DDP(Part(out), bucket_cap_mb=0, **options)
    model.register_comm_hook(state, hook)
    data = batches(5)
    with model.join(enable=join):
        for step, x in enumerate(data):
            if join and step == 4 and dist.get_rank():
                break  # and shadows the last pass of the first rank
            backward(model, x)
            if not join:
                parallel_assert(state.iter == step + 1, f"{state.iter} after step {step}")
    parallel_assert(state.iter == 5, f"{state.iter}")


class Branches(nn.Module):
    """Uses one layer always, and of two others those that it is told to."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first, self.one, self.two = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor, one: bool, two: bool) -> torch.Tensor:
        x = self.first(x)
        x = self.one(x) if one else x
        return self.two(x) if two else x


@pytest.mark.parametrize("kind", STEPPING)
@pytest.mark.parametrize("mode", ["", "views", "skip", "static", "join", "no_sync", "one bucket"])
def test_what_no_rank_uses_is_not_stepped(kind: str, mode: str) -> None:
    """Momentum and decay move a parameter whose gradient is zero, but none without a gradient."""
    options: dict[str, Any] = {"find_unused_parameters": True}
    if mode == "static":
        options = {"static_graph": True}
    elif mode == "views":
        options["gradient_as_bucket_view"] = True
    elif mode == "skip":
        options["skip_all_reduce_unused_params"] = True
    settings = {"momentum": 0.9, "weight_decay": 0.1}
    model = stepping(kind, Branches(), settings, **options)
    if mode == "one bucket":
        options["bucket_cap_mb"] = 25
    reference = DDP(Branches(), **options)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1, **settings)
    me, data = dist.get_rank(), batches(5)
    for step, x in enumerate(data):
        one, two = step in (1, 3), step in (0, 4)
        if mode == "static":
            one, two = False, True
        elif mode != "skip":
            one = one and me == 0  # the other ranks get the average
        for each in (model, reference):
            each.zero_grad()
            if mode == "no_sync" and step == 2:
                with each.no_sync():
                    each(mine(x), True, two).square().mean().backward()
            with each.join(enable=mode == "join"):
                if mode != "join" or step != 4 or me == 0:
                    each(mine(x), one, two).square().mean().backward()
                if each is reference:
                    optimizer.step()
        off = distance(model, reference)
        parallel_assert(off <= 1e-6, f"{kind}: off by {off} after step {step}")
        parallel_assert(everywhere(model), f"{kind}: ranks differ after step {step}")


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("kind", STEPPING)
def test_what_is_unused_is_learned_anew_in_a_group_that_was_reconfigured(kind: str) -> None:
    """A rank has died in a static graph's first pass, at whose end some ranks were."""
    settings = {"momentum": 0.9, "weight_decay": 0.1}
    model = stepping(kind, Branches(), settings, static_graph=True)
    reference = DDP(Branches(), static_graph=True)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1, **settings)
    me, data = dist.get_rank(), batches(4)
    one = me > 0  # the first rank does not know that another uses it
    if me == 0:
        loss = model(mine(data[0]), one, False).square().mean()
        with pytest.raises(dist.DistMismatchError):
            loss.backward()
    else:  # as many calls, in place of a death
        for work in [dist.barrier(async_op=True) for _ in range(len(model.reducer.buckets) + 1)]:
            with pytest.raises(dist.DistMismatchError):
                work.wait()
    model.reducer._generation -= 1
    for step, x in enumerate(data):
        for each in (model, reference):
            each.zero_grad()
            with each.no_sync() if step == 0 else nullcontext():
                each(mine(x), one, step == 0).square().mean().backward()
            if step == 0:
                each(mine(x), one, False).square().mean().backward()
        optimizer.step()
        off = distance(model, reference)
        parallel_assert(off <= 1e-6, f"{kind}: off by {off} after step {step}")
        parallel_assert(everywhere(model), f"{kind}: ranks differ after step {step}")


@contextmanager
def interrupted(seconds: float) -> Iterator[None]:
    """Let a signal's handler raise on rank 0, and the last rank come later."""

    def handler(number: int, frame: Any) -> None:
        raise Boom

    first, last = (dist.get_rank() == rank for rank in (0, dist.get_world_size() - 1))
    if last:
        time.sleep(3 * seconds)
    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, seconds if first else 0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("kind", ["no hook", "allreduce", "ZeRO", "after a hook", "in backward"])
def test_a_handlers_exception_while_a_pass_is_given_up(kind: str) -> None:
    """What is in flight then still uses the buckets: the next forward goes on to wait for it."""
    steps = kind in STEPPING
    model = stepping(kind, net()) if steps else DDP(net(), bucket_cap_mb=0)
    if kind == "allreduce":
        model.register_comm_hook(None, hooks.allreduce_hook)
    reference, data = DDP(net()), batches(5)
    for x in data[:3]:
        backward(model, x)
    dist.barrier()
    heard = False
    with interrupted(0.3):
        with failing(model.module[0]):
            backward(model, data[3])
        try:
            model(mine(data[3]))
        except Boom:
            heard = True
    model.zero_grad()
    loss = model(mine(data[4])).square().mean()
    before = [p.detach().clone() for p in model.parameters()]
    loss.backward()
    parallel_assert(heard == (dist.get_rank() == 0), f"{kind}: {heard}")
    parallel_assert(everywhere(model), f"{kind}: ranks differ after a step")
    for parameter, value in zip(reference.parameters(), before, strict=True):
        parameter.data.copy_(value)
    backward(reference, data[4])
    for own, other, value in zip(model.parameters(), reference.parameters(), before, strict=True):
        found = (value - own.detach()) / 0.1 if steps else own.grad
        off = (found - other.grad).abs().max().item()
        parallel_assert(off <= 1e-5, f"{kind}: off by {off}")


def test_a_future_that_fails_in_a_pass_that_is_given_up() -> None:
    """Torch's futures keep no types: the error may be one of communication."""
    model, fails = DDP(net(), bucket_cap_mb=0), []

    def then(future: torch.futures.Future[Any]) -> torch.Tensor:
        if fails:
            raise ValueError("of the program")
        return future.value()[0]

    def hook(state: Any, bucket: Any) -> Any:
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(then)

    model.register_comm_hook(None, hook)
    x = batches(1)[0]
    backward(model, x)
    fails.append(1)
    with failing(model.module[0]):
        backward(model, x)
    for _ in range(2):
        with parallel_raises(dist.DistError, match="earlier backward pass failed.*of the program"):
            model(mine(x))
