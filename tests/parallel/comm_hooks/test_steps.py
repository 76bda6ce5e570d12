"""Hooks whose optimizers step: with a backward that is ended by hand."""

from __future__ import annotations

import pytest
import torch
from ddp_cases import DDP, distance, mine
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward

from hpcdist.parallel import comm_hooks as hooks
from hpcdist.testing import parallel_assert

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
