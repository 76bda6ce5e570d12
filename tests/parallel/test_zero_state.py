"""ZeroRedundancyOptimizer: what a state contains beside that of parameters, and its hooks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import hpcdist as dist
from hpcdist.optim import ZeroRedundancyOptimizer
from hpcdist.testing import parallel_assert

pytestmark = pytest.mark.ranks


class Counting(torch.optim.SGD):
    """An optimizer that notes something of all parameters together."""

    def step(self, closure: Any = None) -> Any:
        whole = self.state["whole"]
        whole["steps"] = whole.get("steps", 0) + 1
        return super().step(closure)


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(size)) for size in (3, 5, 2, 4)]


def stepped(optimizer: torch.optim.Optimizer, steps: int = 1) -> dict[str, Any]:
    """The whole state on all ranks."""
    for _ in range(steps):
        for group in optimizer.param_groups:
            for number, parameter in enumerate(group["params"]):
                parameter.grad = torch.full_like(parameter, number + 1.0)
        optimizer.step()
    if not isinstance(optimizer, ZeroRedundancyOptimizer):
        return optimizer.state_dict()
    for rank in range(dist.get_world_size()):
        optimizer.consolidate_state_dict(rank)
    found = [None]
    last = dist.get_world_size() - 1
    if dist.get_rank() == last:
        found = [optimizer.state_dict()]
    dist.broadcast_object_list(found, last)
    return found[0]


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(equal, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def test_state_of_no_parameter() -> None:
    options = {"lr": 0.1, "momentum": 0.9}
    zero = ZeroRedundancyOptimizer(parameters(), Counting, **options)
    whole = Counting(parameters(), **options)
    found, wanted = stepped(zero, 3), stepped(whole, 3)
    parallel_assert(equal(found, wanted), lambda: f"{found} is not {wanted}")
    fresh = ZeroRedundancyOptimizer(parameters(), Counting, **options)
    fresh.load_state_dict(copy.deepcopy(wanted))
    found, wanted = stepped(fresh), stepped(whole)
    parallel_assert(equal(found, wanted), lambda: f"{found} is not {wanted}")
    zero.load_shard(fresh.shard_state(), fresh.shard_options())
    found, wanted = stepped(zero), stepped(whole)
    parallel_assert(equal(found, wanted), lambda: f"{found} is not {wanted}")


def test_hooks_of_the_state() -> None:
    """They run where those of any optimizer do, and may replace the state."""

    def run(optimizer: torch.optim.Optimizer) -> tuple[list[str], dict[str, Any]]:
        seen: list[str] = []
        optimizer.register_state_dict_pre_hook(lambda _optimizer: seen.append("before saving"))
        optimizer.register_state_dict_post_hook(lambda _optimizer, state: {**state, "more": 1})
        optimizer.register_load_state_dict_pre_hook(
            lambda _optimizer, state: {
                **state,
                "param_groups": [{**group, "lr": 0.5} for group in state["param_groups"]],
            }
        )
        optimizer.register_load_state_dict_post_hook(lambda _optimizer: seen.append("loaded"))
        state = stepped(optimizer)
        optimizer.load_state_dict(copy.deepcopy(state))
        again = stepped(optimizer)
        return seen, {**again, "more": state["more"]}

    made = ZeroRedundancyOptimizer(parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    found = run(made)
    wanted = run(torch.optim.SGD(parameters(), lr=0.1, momentum=0.9))
    parallel_assert(equal(found[1], wanted[1]), lambda: f"{found[1]} is not {wanted[1]}")
    if dist.get_rank() == dist.get_world_size() - 1:
        assert found[0] == wanted[0]
    parallel_assert(found[0].count("loaded") == 1)
