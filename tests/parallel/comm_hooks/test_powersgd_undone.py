"""PowerSGD after a pass that nobody steps with: as if there had been none."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
import torch
from ddp_cases import DDP, mine
from torch import nn

import hpcdist as dist
from hpcdist.parallel import comm_hooks as hooks
from hpcdist.testing import parallel_assert, parallel_raises

pytestmark = pytest.mark.ranks

HOOKS = [hooks.powerSGD_hook, hooks.batched_powerSGD_hook]


class Boom(Exception):
    """What a guard against NaN raises."""


def trained(hook: Any, **options: Any) -> tuple[DDP, hooks.PowerSGDState]:
    torch.manual_seed(7)
    layers = [nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 12)]
    model = DDP(nn.Sequential(*layers), bucket_cap_mb=0)
    state = hooks.PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=0.1, **options)
    model.register_comm_hook(state, hook)
    return model, state


def step(model: DDP, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    model(mine(x)).square().mean().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad
    return [p.grad.clone() for p in model.parameters()]


def give_up(model: DDP, x: torch.Tensor, factor: float) -> None:
    """Run a pass whose first gradients are sent before the last one raises."""

    def fail(_gradient: torch.Tensor) -> None:
        raise Boom

    layers = model.module
    handles = [layers[4].weight.register_hook(lambda gradient: gradient * factor)]
    handles.append(layers[0].weight.register_hook(fail))
    model.zero_grad()
    with suppress(Boom, dist.DistMismatchError):
        model(mine(x)).square().mean().backward()
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize("factor", [3.0, float("nan")], ids=["a number", "NaN"])
@pytest.mark.parametrize("warm", [True, False], ids=["warm", "drawn"])
@pytest.mark.parametrize("hook", HOOKS)
def test_a_pass_that_is_given_up_leaves_nothing_behind(hook: Any, warm: bool, factor: float):
    model, state = trained(hook, warm_start=warm)
    other, reference = trained(hook, warm_start=warm)
    generator = torch.Generator().manual_seed(4)
    for number in range(8):
        x = torch.randn(12, 12, generator=generator)
        if number in (2, 3, 6):  # the first compressed pass among them, and two in turn
            for _ in range(1 + (number == 6)):
                give_up(model, x, factor)
        got, want = step(model, x), step(other, x)
        same = [torch.equal(one, two) for one, two in zip(got, want, strict=True)]
        parallel_assert(all(same), f"step {number}: {same}")
    parallel_assert(state.compression_stats() == reference.compression_stats())


@pytest.mark.parametrize("where", ["4.weight", "0.weight", "0.bias"])
@pytest.mark.parametrize("warm", [True, False], ids=["warm", "drawn"])
@pytest.mark.parametrize("hook", HOOKS)
def test_averages_that_are_not_finite_leave_nothing_behind(hook: Any, warm: bool, where: str):
    """GradScaler skips such a step, and would skip all later ones."""
    model, state = trained(hook, warm_start=warm)
    other, _ = trained(hook, warm_start=warm)
    parameter = model.module.get_parameter(where)
    generator = torch.Generator().manual_seed(4)
    for number in range(8):
        x = torch.randn(12, 12, generator=generator)
        if number in (2, 3, 6):  # the first compressed pass among them
            scale = float("inf") if dist.get_rank() == dist.get_world_size() - 1 else 1.0
            with parameter.register_hook(lambda gradient, scale=scale: gradient * scale):
                model.zero_grad()
                model(mine(x)).square().mean().backward()
            seen = all(p.grad.isfinite().all() for p in model.parameters())
            parallel_assert(not seen, "nothing tells the optimizer")
        got, want = step(model, x), step(other, x)
        same = [torch.equal(one, two) for one, two in zip(got, want, strict=True)]
        parallel_assert(all(same), f"step {number}: {same}")
    parallel_assert(state.iter == 8 + 3, "a step that was averaged is not counted")


@pytest.mark.parametrize("hook", HOOKS)
def test_the_state_between_such_a_pass_and_the_next(hook: Any):
    model, state = trained(hook)
    other, reference = trained(hook)
    for number in range(5):
        x = torch.randn(12, 12, generator=torch.Generator().manual_seed(number))
        step(model, x)
        step(other, x)
    give_up(model, x, float("nan"))
    found, wanted = state.state_dict(), reference.state_dict()
    for name in ("error_dict", "q_memory_dict"):
        same = {i: torch.equal(found[name][i], each) for i, each in wanted[name].items()}
        parallel_assert(len(found[name]) == len(same) and all(same.values()), f"{name}: {same}")
    parallel_assert(found["rng"] == wanted["rng"])


@pytest.mark.parametrize("hook", HOOKS)
def test_a_state_that_one_rank_looks_at_in_a_pass_goes_on_as_on_the_others(hook: Any):
    model, state = trained(hook, warm_start=False)
    other, _ = trained(hook, warm_start=False)
    seen = []

    def look(_gradient: torch.Tensor) -> None:
        if dist.get_rank() == 0:
            seen.append(state.state_dict())

    model.module[0].weight.register_hook(look)
    for number in range(6):
        x = torch.randn(12, 12, generator=torch.Generator().manual_seed(number))
        got, want = step(model, x), step(other, x)
        parallel_assert(all(map(torch.equal, got, want)), f"step {number}")
    parallel_assert(len(seen) == 6 * (dist.get_rank() == 0))


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("hook", HOOKS)
def test_ranks_that_have_counted_different_passes_are_told(hook: Any):
    model, state = trained(hook)
    for number in range(3):
        step(model, torch.randn(12, 12, generator=torch.Generator().manual_seed(number)))
    state.iter += dist.get_rank() == 0
    with parallel_raises(dist.DistError, match="step"):
        step(model, torch.ones(12, 12))
