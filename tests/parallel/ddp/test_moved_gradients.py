"""Gradients to which the program has given other memory, or another dtype."""

from __future__ import annotations

import copy

import pytest
import torch
from ddp_cases import DDP
from torch import nn

import hpcdist as dist
from hpcdist.testing import parallel_assert, parallel_raises

pytestmark = pytest.mark.ranks


def assign(gradient: torch.Tensor) -> None:
    gradient.data = torch.zeros_like(gradient)


def place(gradient: torch.Tensor) -> None:
    with torch.no_grad():
        gradient.set_(torch.zeros_like(gradient))


def network(width: int) -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 3)).double()


def batch(rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(5, 4, dtype=torch.float64, generator=generator)


def averages(model: nn.Module) -> list[torch.Tensor]:
    """Compute here what the ranks compute together."""
    alone, size = copy.deepcopy(model), dist.get_world_size()
    alone.zero_grad()
    for rank in range(size):
        (alone(batch(rank)).pow(2).sum() / size).backward()
    return [p.grad for p in alone.parameters()]


@pytest.mark.parametrize("cap", [None, 0.0001], ids=["one bucket", "a bucket each"])
@pytest.mark.parametrize("width", [8, 40_000], ids=["short", "long"])
@pytest.mark.parametrize("as_view", [False, True], ids=["copies", "views"])
@pytest.mark.parametrize("move", [assign, place])
def test_gradients_with_other_memory(move, as_view, width, cap):
    model = network(width)
    ddp = DDP(model, gradient_as_bucket_view=as_view, bucket_cap_mb=cap)
    me = dist.get_rank()
    for step in range(6):
        if step in (2, 3):  # after the buckets have been rebuilt, and twice in turn
            for parameter in list(model.parameters())[:: step - 1]:
                move(parameter.grad)
        if step != 2:
            ddp.zero_grad(set_to_none=step == 4)
        ddp(batch(me)).pow(2).sum().backward()
        got = [p.grad for p in model.parameters()]
        close = [torch.allclose(g, w) for g, w in zip(got, averages(model), strict=True)]
        parallel_assert(all(close), f"step {step}: {close}")


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("width", [8, 40_000], ids=["short", "long"])
@pytest.mark.parametrize("as_view", [False, True], ids=["copies", "views"])
def test_a_module_that_is_converted_after_wrapping(as_view, width, steps):
    """An average in float32 is none of gradients in float64."""
    model = network(width).float()
    ddp = DDP(model, gradient_as_bucket_view=as_view)
    for _ in range(steps):  # the second one with the buckets' final order
        ddp(batch(0).float()).pow(2).sum().backward()
    ddp.double()
    with parallel_raises(dist.DistError, match=r"is of torch\.float64, but .* of torch\.float32"):
        ddp(batch(0)).pow(2).sum().backward()
    ddp = DDP(model, gradient_as_bucket_view=as_view)
    ddp.zero_grad()
    ddp(batch(dist.get_rank())).pow(2).sum().backward()
    pairs = zip(averages(model), (p.grad for p in model.parameters()), strict=True)
    parallel_assert(all(torch.allclose(a, b, rtol=1e-12) for a, b in pairs))


@pytest.mark.parametrize("who", ["first", "all, of which some have gradients", "before a step"])
@pytest.mark.parametrize("width", [3, 120], ids=["short", "long"])
@pytest.mark.parametrize("as_view", [False, True], ids=["copies", "views"])
def test_parameters_whose_strides_change(as_view, width, who):
    """The ranks' buckets have one layout, that of construction."""
    torch.manual_seed(2)
    model = nn.Sequential(nn.Conv2d(2, width, 3), nn.Conv2d(width, width, 2)).double()
    ddp = DDP(model, gradient_as_bucket_view=as_view)
    size, me = dist.get_world_size(), dist.get_rank()
    x = torch.randn(size, 2, 2, 6, 6, generator=torch.Generator().manual_seed(1)).double()
    for step in range(4):
        if step == (0 if who == "before a step" else 2):
            ddp.zero_grad(set_to_none=me > 0)
            if me == 0 or who.startswith("all"):
                model.to(memory_format=torch.channels_last)
        ddp.zero_grad(set_to_none=me > 0)
        ddp(x[me]).square().mean().backward()
    found = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    for rank in range(size):
        (model(x[rank]).square().mean() / size).backward()
    off = [(g - p.grad).abs().max().item() for g, p in zip(found, model.parameters(), strict=True)]
    parallel_assert(max(off) <= 1e-9, f"off by {off}")
