"""ZeroRedundancyOptimizer: its parameter groups are those of the optimizer it divides."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch import nn

import hpcdist as dist
from hpcdist.optim import ZeroRedundancyOptimizer
from hpcdist.parallel import comm_hooks
from hpcdist.testing import parallel_assert, parallel_raises

pytestmark = pytest.mark.ranks


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 7), nn.Tanh(), nn.Linear(7, 2))


def train(model, optimizer, x, steps=2):
    for _ in range(steps):
        optimizer.zero_grad()
        model(x).pow(2).sum().backward()
        optimizer.step()


def equal(model, whole):
    pairs = zip(model.parameters(), whole.parameters(), strict=True)
    return all(torch.equal(one, other) for one, other in pairs)


def options(optimizer):
    return [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]


@pytest.mark.parametrize("named", [False, True], ids=["unnamed", "named"])
@pytest.mark.parametrize(
    "kind, values",
    [(torch.optim.SGD, {"momentum": 0.9}), (torch.optim.AdamW, {}), (torch.optim.NAdam, {})],
)
def test_a_group_that_is_added_has_the_defaults_of_the_class(rng, kind, values, named):
    model, size = network(), dist.get_world_size()
    whole, x = copy.deepcopy(model), torch.from_numpy(rng.standard_normal((4, 6))).float()
    made = []
    for module, make in (
        (model, lambda groups: ZeroRedundancyOptimizer(groups, kind, lr=0.1, **values)),
        (whole, lambda groups: kind(groups, lr=0.1, **values)),
    ):
        each = list(module.named_parameters() if named else module.parameters())
        optimizer = make([{"params": each[:2]}])
        optimizer.add_param_group({"params": each[2:], "lr": 0.01})
        made.append(optimizer)
    zero, undivided = made
    parallel_assert(options(zero) == options(undivided), f"{options(zero)} {options(undivided)}")
    train(model, zero, x)
    train(whole, undivided, x)
    parallel_assert(options(zero) == options(undivided))
    parallel_assert(equal(model, whole))

    zero.consolidate_state_dict(size - 1)
    if dist.get_rank() == size - 1:
        undivided.load_state_dict(copy.deepcopy(zero.state_dict()))
    zero.load_state_dict(copy.deepcopy(undivided.state_dict()))
    train(whole, undivided, x)
    train(model, zero, x)
    parallel_assert(equal(model, whole))


def test_adding_a_group_leaves_the_options_of_the_others():
    """They may have been changed since the last step, as a scheduler does."""
    model = network()
    first, *others = model.parameters()
    zero = ZeroRedundancyOptimizer([first], torch.optim.SGD, lr=1.0)
    first.grad = torch.zeros_like(first)
    zero.step()
    zero.param_groups[0]["lr"] = 0.1
    zero.add_param_group({"params": others, "lr": 0.5})
    rates = [group["lr"] for group in zero.param_groups]
    parallel_assert(rates == [0.1, 0.5], f"{rates}")


def test_a_group_that_comes_after_the_hook_is_refused():
    """Backward would not step it, and step() does nothing."""
    model = dist.DistributedDataParallel(nn.Linear(2, 1))
    zero = ZeroRedundancyOptimizer(
        [model.module.weight], torch.optim.SGD, overlap_with_ddp=True, lr=1.0
    )
    zero.add_param_group({"params": [model.module.bias]})
    hook = comm_hooks.hook_with_zero_step(comm_hooks.allreduce_hook, model, zero)
    model.register_comm_hook(None, hook)
    with parallel_raises(RuntimeError, match="before hook_with_zero_step"):
        zero.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    parallel_assert(len(zero.param_groups) == len(zero.optim.param_groups) == 2)


def test_named_parameters(rng):
    model = network()
    whole, x = copy.deepcopy(model), torch.from_numpy(rng.standard_normal((4, 6))).float()
    zero = ZeroRedundancyOptimizer(model.named_parameters(), torch.optim.AdamW, lr=0.1)
    undivided = torch.optim.AdamW(whole.named_parameters(), lr=0.1)
    train(model, zero, x)
    train(whole, undivided, x)
    parallel_assert(options(zero) == options(undivided))
    parallel_assert(equal(model, whole))
    zero.consolidate_state_dict()
    consolidated = zero.state_dict() if dist.get_rank() == 0 else undivided.state_dict()
    parallel_assert(consolidated["param_groups"] == undivided.state_dict()["param_groups"])


def test_a_scheduler_that_looks_for_the_defaults_of_the_class(rng):
    model = network()
    whole, x = copy.deepcopy(model), torch.from_numpy(rng.standard_normal((4, 6))).float()
    zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.1)
    undivided = torch.optim.Adam(whole.parameters(), lr=0.1)
    rates = [
        torch.optim.lr_scheduler.OneCycleLR(one, 0.1, total_steps=6) for one in (zero, undivided)
    ]
    for _ in range(4):
        train(model, zero, x, 1)
        train(whole, undivided, x, 1)
        for rate in rates:
            rate.step()
    parallel_assert(options(zero) == options(undivided))
    parallel_assert(equal(model, whole))


def test_an_optimizer_whose_step_needs_all_parameters():
    with parallel_raises(ValueError, match="cannot divide LBFGS"):
        ZeroRedundancyOptimizer(network().parameters(), torch.optim.LBFGS)


def test_a_class_with_arguments_given_before():
    model, whole = network(), network()
    kind = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    zero = ZeroRedundancyOptimizer(({"params": model.parameters()} for _ in range(1)), kind)
    x = torch.ones(3, 6)
    train(model, zero, x)
    train(whole, kind(whole.parameters()), x)
    parallel_assert(equal(model, whole) and zero.param_groups[0]["momentum"] == 0.9)
