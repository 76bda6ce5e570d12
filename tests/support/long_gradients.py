"""A model with two long gradients and a short one, for tests of averages without a copy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from ddp_cases import DDP, grads
from ddp_network import averages
from torch import nn

import hpcdist as dist


class Two(nn.Module):
    """Two parameters of a piece each, and a short one."""

    def __init__(self, meet: Callable[[Any, Any], torch.Tensor], dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.one = nn.Parameter(torch.randn(16, 24).to(dtype))
        self.other = nn.Parameter(torch.randn(16, 24).to(dtype))
        self.short = nn.Parameter(torch.randn(3).to(dtype))
        self.meet = meet

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.meet(self.one, self.other) * x + self.short.sum()


def data(dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    return torch.randn(16, 24, generator=generator).to(dtype)


def backward(module: nn.Module, x: torch.Tensor) -> None:
    out = module(x)
    (out * out.conj()).real.sum().backward()


def apart(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return one * one + other


def one_memory(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Both gradients are views of one tensor."""
    return (one.view(-1) + other.view(-1)).view(16, 24)


def expected(meet: Any, *inputs: torch.Tensor) -> list[torch.Tensor]:
    alone = Two(meet, inputs[0].dtype)
    for x in inputs:
        backward(alone, x)
    return averages(grads(alone))


def without_copy(model: DDP) -> list[bool]:
    return [
        bucket.single and (bucket.in_place or bucket.source is not None)
        for bucket in model.reducer.buckets
    ]


def on_one_node(model: DDP) -> bool:
    return model.process_group.carrier.native.checks_through == "shared memory"


def watched(model: DDP) -> list[list[bool]]:
    """For each backward, which buckets did not copy their gradients."""
    seen: list[list[bool]] = []
    finish = model.reducer._pipeline.finish
    model.reducer._pipeline.finish = lambda: (seen.append(without_copy(model)), finish())[1]
    return seen
