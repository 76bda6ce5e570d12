"""Communication hooks: a function of the user's moves the gradients."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
import torch
from patience import at_most
from torch import nn

import hpcdist as dist
from hpcdist.parallel import comm_hooks
from hpcdist.parallel.comm_hooks import fp16_compress_wrapper
from hpcdist.testing import parallel_assert, parallel_raises

pytestmark = pytest.mark.ranks

DDP = dist.DistributedDataParallel


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))


def batch() -> torch.Tensor:
    generator = torch.Generator().manual_seed(dist.get_rank())
    return torch.randn(4, 6, generator=generator)


def average(_state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    work = dist.all_reduce(bucket.buffer(), dist.ReduceOp.AVG, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def grads(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters()]


def run(hook: Any, state: Any = None, **arguments: Any) -> list[torch.Tensor]:
    model = DDP(layers(), **arguments)
    if hook is not None:
        model.register_comm_hook(state, hook)
    for _ in range(2):
        model.zero_grad()
        model(batch()).square().sum().backward()
    return grads(model)


@pytest.mark.parametrize("as_view", [False, True], ids=["copies", "views"])
@pytest.mark.parametrize("cap", [None, 0])
def test_a_hook_that_averages_does_what_no_hook_does(cap: float | None, as_view: bool) -> None:
    arguments = {"bucket_cap_mb": cap, "gradient_as_bucket_view": as_view}
    pairs = zip(run(average, **arguments), run(None, **arguments), strict=True)
    parallel_assert(all(torch.equal(a, b) for a, b in pairs))


def test_a_result_of_its_own_becomes_the_gradients() -> None:
    def sevens(_state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        future = torch.futures.Future()
        future.set_result(torch.full_like(bucket.buffer(), 7, dtype=torch.float64))
        return future

    for as_view in (False, True):
        found = run(sevens, gradient_as_bucket_view=as_view)
        parallel_assert(all(bool((g == 7).all()) for g in found))


def test_what_a_bucket_tells() -> None:
    seen = []

    def look(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        state.append((bucket.index(), bucket.is_last(), len(bucket.parameters())))
        pairs = zip(bucket.gradients(), bucket.parameters(), strict=True)
        seen.extend(torch.equal(g, p.grad) and g.shape == p.shape for g, p in pairs)
        whole = torch.cat([g.flatten() for g in bucket.gradients()])
        seen.append(torch.equal(whole, bucket.buffer()))
        bucket.set_buffer(bucket.buffer().double())
        seen.extend(g.dtype == torch.float64 for g in bucket.gradients())
        seen.append("GradBucket" in repr(bucket))
        bucket.set_buffer(bucket.buffer().float())
        return average(None, bucket)

    state: list = []
    run(look, state, bucket_cap_mb=0)
    expected = [(i, i == 5, 1) for i in range(6)]
    parallel_assert(state == expected * 2, str(state))
    parallel_assert(all(seen))


def test_hooks_that_are_refused() -> None:
    model = DDP(layers())
    with parallel_raises(TypeError, match="hook must be callable"):
        model.register_comm_hook(None, 3)  # type: ignore[arg-type]
    parallel_assert("must be callable" in model._get_ddp_logging_data()["error"])
    model.register_comm_hook(None, average)
    with parallel_raises(RuntimeError, match="register_comm_hook can only be called once"):
        model.register_comm_hook(None, average)
    parallel_assert("only be called once" in model._get_ddp_logging_data()["error"])


def freed(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.clone()
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (torch.Tensor.int, "must hold gradients"),
        (lambda tensor: tensor.to("meta"), "meta tensor"),
        (freed, "storage"),
        (torch.Tensor.to_sparse, "not a sparse tensor"),
        (lambda tensor: tensor.to(torch.complex64), "of torch.float32.* and torch.complex64"),
    ],
    ids=["integers", "meta", "freed", "sparse", "complex"],
)
def test_what_is_no_gradient_is_refused(make: Any, text: str) -> None:
    def hook(_state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(make(bucket.buffer()))
        return future

    model = DDP(layers())
    model.register_comm_hook(None, hook)
    with parallel_raises(TypeError, match=f"communication hook.*{text}"):
        model(batch()).square().sum().backward()


@pytest.mark.parametrize(
    ("hook", "kind"),
    [
        (comm_hooks.powerSGD_hook, "PowerSGDState"),
        (comm_hooks.batched_powerSGD_hook, "PowerSGDState"),
        (comm_hooks.post_localSGD_hook, "PostLocalSGDState"),
        (comm_hooks.optimizer_in_backward_hook, "OptimizerInBackward"),
    ],
)
def test_a_state_of_another_kind_is_refused(hook: Any, kind: str) -> None:
    """It was an AttributeError."""
    model = DDP(layers())
    model.register_comm_hook(None, hook)
    text = (
        f"the state of {hook.__name__} must be a hpcdist.parallel.comm_hooks.{kind}, not builtins"
    )
    with parallel_raises(TypeError, match=text):
        model(batch()).square().sum().backward()


@pytest.mark.parametrize("kind", ["plain", "wrapped", "then"])
def test_a_future_that_nobody_completes_is_a_timeout(kind: str) -> None:
    """All buckets' together take one timeout, and the group goes on."""

    def never(_state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        return future.then(lambda done: done.value()) if kind == "then" else future

    group = dist.new_group()
    model = DDP(layers(), process_group=group, bucket_cap_mb=0)
    model.register_comm_hook(None, fp16_compress_wrapper(never) if kind == "wrapped" else never)
    dist.barrier()
    group.timeout = timedelta(seconds=1)
    began, text = time.monotonic(), ""
    try:
        model(batch()).square().sum().backward()
    except dist.DistTimeoutError as error:
        text = str(error)
    spent = time.monotonic() - began
    parallel_assert("timeout after 1" in text and "hook for bucket 0" in text, lambda: text)
    parallel_assert(0.9 < spent < at_most(4), lambda: f"{spent:.2f} s")
    total = torch.ones(2)
    dist.all_reduce(total, group=group)
    parallel_assert(bool((total == dist.get_world_size()).all()))
    dist.destroy_process_group(group)
