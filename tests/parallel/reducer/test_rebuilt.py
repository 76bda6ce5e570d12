"""Buckets that are rebuilt in the order in which the gradients appear."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from ddp_cases import DDP, grads, mine
from torch import nn
from torch.nn import functional as F

import hpcdist as dist
from hpcdist.testing import parallel_assert

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.filterwarnings("ignore:find_unused_parameters=True was specified"),
]


# --- the rebuilt order -------------------------------------------------------------------------


class Reversed(nn.Module):
    """Uses its layers in the reverse of the order they are registered in."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in reversed(self.layers):
            x = torch.tanh(layer(x))
        return x


@pytest.mark.parametrize("as_view", [False, True], ids=["copies", "views"])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_buckets_are_rebuilt_in_the_order_of_gradients(as_view: bool, set_to_none: bool) -> None:
    model = DDP(Reversed(), bucket_cap_mb=1 / 32, gradient_as_bucket_view=as_view)
    alone, x = Reversed(), torch.randn(12, 64, generator=torch.Generator().manual_seed(2))

    def order() -> list[list[int]]:
        return [bucket.members for bucket in model.reducer.buckets]

    parallel_assert(order() == [[4, 3], [2, 1], [0]])
    for step in range(3):
        model.zero_grad(set_to_none)
        alone.zero_grad()
        model(mine(x)).square().mean().backward()
        alone(x).square().mean().backward()
        pairs = zip(grads(model), grads(alone), strict=True)
        parallel_assert(all(torch.allclose(a, b, atol=1e-7) for a, b in pairs), f"step {step}")
        parallel_assert(order() == ([[4, 3], [2, 1], [0]] if step == 0 else [[0, 1], [2, 3], [4]]))
    data = model._get_ddp_logging_data()
    parallel_assert(data["has_rebuilt_buckets"] == 1)
    parallel_assert(data["rebuilt_per_bucket_param_indices"] == "0 1, 2 3, 4")
    parallel_assert(data["rebuilt_bucket_sizes"] == "32768, 32768, 16384")


def test_gradients_that_are_views_move_when_buckets_are_rebuilt() -> None:
    model = DDP(Reversed(), bucket_cap_mb=1 / 32, gradient_as_bucket_view=True)
    expected = DDP(Reversed(), bucket_cap_mb=1 / 32)
    x = torch.full((2, 64), dist.get_rank() + 1.0)
    for _ in range(3):  # without zero_grad: they accumulate
        for either in (model, expected):
            either(x).square().mean().backward()
    pairs = zip(grads(model), grads(expected), strict=True)
    parallel_assert(all(torch.equal(a, b) for a, b in pairs))
    for bucket in model.reducer.buckets:
        start = bucket.buffer.untyped_storage().data_ptr()
        parallel_assert(
            all(p.grad.untyped_storage().data_ptr() == start for p in bucket.parameters)
        )


@pytest.mark.mpi(min_size=2)
def test_rank_0_decides_about_the_order() -> None:
    class Either(Reversed):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            layers = self.layers if dist.get_rank() else reversed(self.layers)
            for layer in layers:
                x = torch.tanh(layer(x))
            return x

    model = DDP(Either(), bucket_cap_mb=0)
    for _ in range(2):
        F.mse_loss(model(torch.ones(2, 64)), torch.zeros(2, 64)).backward()
    members = [bucket.members[0] for bucket in model.reducer.buckets]
    parallel_assert(members == [0, 1, 2, 3, 4], str(members))


@pytest.mark.mpi(min_size=2)
def test_a_static_graph_that_some_ranks_saw_before_the_group_was_reconfigured() -> None:
    group = dist.new_group()
    model = DDP(Reversed(), process_group=group, static_graph=True)
    alone, x = Reversed(), torch.randn(12, 64, generator=torch.Generator().manual_seed(2))
    if dist.get_rank() == 0:
        loss = model(mine(x)).square().mean()
        with pytest.raises(dist.DistError):
            loss.backward()
    else:  # as many calls, in place of a death
        for work in [dist.barrier(group, async_op=True) for _ in range(2)]:
            with pytest.raises(dist.DistError):
                work.wait()
    parallel_assert(len(model.reducer.buckets) == 1)
    group.members = replace(group.members, generation=group.members.generation + 1)
    for _ in range(3):
        model.zero_grad()
        alone.zero_grad()
        model(mine(x)).square().mean().backward()
        alone(x).square().mean().backward()
        for a, b in zip(grads(model), grads(alone), strict=True):
            parallel_assert(torch.allclose(a, b, atol=1e-6))
    dist.destroy_process_group(group)
