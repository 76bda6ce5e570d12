"""Hooks that wrap another one: what they take from its future, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable
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

KINDS = ["fp16", "bf16", "after a hook", "ZeRO", "ZeRO, interleaved"]


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))


class Descend:
    """Steps one parameter."""

    def step_param(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        with torch.no_grad():
            parameter.sub_(gradient, alpha=0.1)


def holding(form: Callable[[torch.Tensor], Any]) -> hooks.default.Hook:
    """A hook that averages, and whose future holds its result in another form."""

    def hook(_state: None, bucket: dist.GradBucket) -> torch.futures.Future[Any]:
        future: torch.futures.Future[Any] = torch.futures.Future()
        average = bucket.buffer().clone()
        dist.all_reduce(average, dist.ReduceOp.AVG)
        future.set_result(form(average))
        return future

    return hook


def wrapped(kind: str, hook: hooks.default.Hook) -> DDP:
    model = DDP(net(), bucket_cap_mb=0.0001)
    if kind == "after a hook":
        hook = hooks.hook_then_optimizer(hook, hooks.OptimizerHookState(Descend()))
    elif kind.startswith("ZeRO"):
        zero = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.1
        )
        interleaved = kind == "ZeRO, interleaved"
        wrap = hooks.hook_with_zero_step_interleaved if interleaved else hooks.hook_with_zero_step
        hook = wrap(hook, model, zero)
    else:
        half = hooks.fp16_compress_wrapper if kind == "fp16" else hooks.bf16_compress_wrapper
        hook = half(hook)
    model.register_comm_hook(None, hook)
    return model


def train(kind: str, model: nn.Module) -> None:
    torch.manual_seed(4)
    for _ in range(3):
        model.zero_grad()
        model(mine(torch.randn(12, 4))).square().mean().backward()
        if kind in ("fp16", "bf16"):
            with torch.no_grad():
                for p in model.parameters():
                    p.sub_(p.grad, alpha=0.1)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "form", [lambda x: [x], lambda x: (x,), lambda x: [x.double()]], ids=["list", "tuple", "double"]
)
def test_the_future_may_hold_a_list_of_one_tensor(kind: str, form: Callable[..., Any]) -> None:
    models = [wrapped(kind, holding(form)), wrapped(kind, holding(lambda x: x))]
    for model in models:
        train(kind, model)
    parallel_assert(distance(*models) == 0, lambda: f"off by {distance(*models)}")
    parallel_assert(distance(models[0], net()) > 0, "no step was taken")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("form", "text"),
    [
        (lambda x: None, "not NoneType"),
        (lambda x: [x, x], "not list"),
        (lambda x: x[:1], "as many elements"),
        (torch.Tensor.int, "must hold gradients"),
    ],
    ids=["nothing", "two", "short", "integers"],
)
def test_what_is_no_gradient_is_refused(kind: str, form: Callable[..., Any], text: str) -> None:
    model = wrapped(kind, holding(form))
    before = [p.detach().clone() for p in model.parameters()]
    with parallel_raises(TypeError, match=f"communication hook.*{text}"):
        train(kind, model)
    same = all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    parallel_assert(same, "a step was taken")
