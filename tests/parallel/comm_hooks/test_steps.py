"""Hooks whose optimizers step: with a backward that is ended by hand, and in mixed precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ddp_cases import DDP, distance, mine
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward

from hpcdist.optim import ZeroRedundancyOptimizer
from hpcdist.parallel import MixedPrecision
from hpcdist.parallel import comm_hooks as hooks
from hpcdist.testing import parallel_assert, parallel_raises

pytestmark = pytest.mark.ranks


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))


def batches(steps: int = 3) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randn(12, 4, generator=generator) for _ in range(steps)]


@pytest.mark.parametrize("cap", [None, 0.0001], ids=["a bucket", "buckets"])
@pytest.mark.parametrize("kind", ["hook", "attached by torch", "static graph"])
def test_an_optimizer_in_backward_that_is_ended_by_hand(kind: str, cap: float | None) -> None:
    module = net()
    if kind == "attached by torch":
        _apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.1})
    model = DDP(module, bucket_cap_mb=cap, static_graph=kind == "static graph")
    if kind != "attached by torch":
        state = hooks.OptimizerInBackward(torch.optim.SGD, model.parameters(), lr=0.1)
        model.register_comm_hook(state, hooks.optimizer_in_backward_hook)
    reference = DDP(net())
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    for step, x in enumerate(batches(4)):
        by_hand = step < 3
        model.require_manual_backward_finalization = by_hand
        model(mine(x)).square().mean().backward()
        if by_hand:
            model.finalize_backward()
        parallel_assert(all(p.grad is None for p in model.parameters()))
        optimizer.zero_grad()
        reference(mine(x)).square().mean().backward()
        optimizer.step()
        parallel_assert(distance(model, reference) <= 1e-6, f"{distance(model, reference)}")


def with_parameters_apart() -> DDP:
    module = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2))
    DDP._set_params_and_buffers_to_ignore_for_model(module, ["1.bias"])
    delayed, trigger = [("1.weight", module[1].weight)], module[0].weight
    return DDP(module, delay_all_reduce_named_params=delayed, param_to_hook_all_reduce=trigger)


@pytest.mark.parametrize("kind", ["zero", "interleaved zero", "in backward"])
def test_parameters_that_no_bucket_has_are_refused(kind: str) -> None:
    """Nothing would step them."""
    model = with_parameters_apart()

    def register(parameters: list[nn.Parameter]) -> None:
        if kind == "in backward":
            state = hooks.OptimizerInBackward(torch.optim.SGD, parameters, lr=0.1)
            model.register_comm_hook(state, hooks.optimizer_in_backward_hook)
            return
        wrap = hooks.hook_with_zero_step
        if kind == "interleaved zero":
            wrap = hooks.hook_with_zero_step_interleaved
        zero = ZeroRedundancyOptimizer(parameters, torch.optim.SGD, overlap_with_ddp=True, lr=0.1)
        model.register_comm_hook(None, wrap(hooks.allreduce_hook, model, zero))

    with parallel_raises(ValueError, match=r"would step 1.weight, 1.bias: .*delay_all_reduce_nam"):
        register(list(model.parameters()))
    first = model.module[0]
    before = first.weight.detach().clone()
    register(list(first.parameters()))
    model(mine(batches(1)[0])).square().mean().backward()
    parallel_assert(not torch.equal(first.weight, before))


class Descend:
    """Steps, and remembers the dtypes of gradients."""

    def __init__(self) -> None:
        self.seen: set[torch.dtype] = set()

    def step_param(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        self.seen.add(gradient.dtype)
        with torch.no_grad():
            parameter.sub_(gradient, alpha=0.1)


@pytest.mark.parametrize("kind", ["ZeRO", "ZeRO, interleaved", "after a hook"])
@pytest.mark.parametrize("reduce_dtype", [None, torch.float32], ids=["bfloat16", "float32"])
def test_in_mixed_precision_optimizers_step_in_full(
    kind: str, reduce_dtype: torch.dtype | None
) -> None:
    settings = MixedPrecision(torch.bfloat16, reduce_dtype)
    models = [DDP(net(), mixed_precision=settings, bucket_cap_mb=0.0001) for _ in range(2)]
    descend = Descend()
    hook: Any
    if kind == "after a hook":
        hook = hooks.hook_then_optimizer(hooks.allreduce_hook, hooks.OptimizerHookState(descend))
    else:
        zero = ZeroRedundancyOptimizer(
            models[0].parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.1
        )
        interleaved = kind == "ZeRO, interleaved"
        wrap = hooks.hook_with_zero_step_interleaved if interleaved else hooks.hook_with_zero_step
        hook = wrap(hooks.allreduce_hook, models[0], zero)
    models[0].register_comm_hook(None, hook)
    models[1].register_comm_hook(None, hooks.allreduce_hook)
    optimizer = torch.optim.SGD(models[1].parameters(), lr=0.1)
    for x in batches():
        for model in models:
            model.zero_grad()
            model(mine(x)).float().square().mean().backward()
        optimizer.step()
        parallel_assert(distance(*models) <= 1e-6, f"off by {distance(*models)}")
    parallel_assert(descend.seen <= {torch.float32}, f"{descend.seen}")
