"""ZeroRedundancyOptimizer with parameters_as_bucket_view, once something moves the parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import hpcdist as dist
from hpcdist.optim import ZeroRedundancyOptimizer
from hpcdist.testing import parallel_assert, parallel_raises

pytestmark = pytest.mark.ranks


def net() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Conv2d(4, 6, 3), nn.Conv2d(6, 4, (2, 3)), nn.Linear(3, 1))


def optimizer(module: nn.Module) -> ZeroRedundancyOptimizer:
    return ZeroRedundancyOptimizer(
        module.parameters(), torch.optim.SGD, parameters_as_bucket_view=True, lr=0.5, momentum=0.9
    )


def channels_last(module: nn.Module) -> None:
    module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def from_a_vector(module: nn.Module) -> None:
    vector_to_parameters(2 * parameters_to_vector(module.parameters()), module.parameters())


def reshaped(module: nn.Module) -> None:
    """In the same memory."""
    weight = next(module.parameters())
    weight.data = weight.data.transpose(2, 3)


def double(module: nn.Module) -> None:
    module.double()


def one_by_one(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.data = parameter.data + 1


MOVES = [channels_last, from_a_vector, reshaped, double, one_by_one]


@pytest.mark.parametrize("move", MOVES, ids=lambda move: move.__name__)
def test_parameters_that_are_moved(move: Callable[[nn.Module], None]) -> None:
    model = net()
    zero = optimizer(model)
    whole = copy.deepcopy(model)
    plain = torch.optim.SGD(whole.parameters(), lr=0.5, momentum=0.9)
    for step in range(4):
        if step == 2:
            move(model)
            move(whole)
        for place, (one, other) in enumerate(
            zip(model.parameters(), whole.parameters(), strict=True)
        ):
            one.grad = torch.full_like(one, place - step)
            other.grad = torch.full_like(other, place - step)
        zero.step()
        plain.step()
        pairs = zip(model.parameters(), whole.parameters(), strict=True)
        off = max((a - b).abs().max().item() for a, b in pairs)
        parallel_assert(off <= 1e-6, f"off by {off} after step {step}")


@pytest.mark.mpi(min_size=2)
def test_parameters_that_one_rank_lays_out_otherwise() -> None:
    model = net()
    zero = optimizer(model)
    if dist.get_rank() == 0:
        channels_last(model)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with parallel_raises(dist.DistMismatchError, match="digest is that of the strides"):
        zero.step()
    dist.barrier()
    if dist.get_rank():
        channels_last(model)
    zero.step()
