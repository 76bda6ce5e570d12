"""DistributedDataParallel on real processes: it trains what one process would train."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ddp_cases import DDP, distance, grads, mine
from ddp_network import BATCH, all_close, assert_equal_everywhere, averages, batches, network
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import hpcdist as dist
from hpcdist.parallel.reducer.schedule import Schedule
from hpcdist.testing import parallel_assert

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("as_view", [False, True], ids=["copies", "views"])
@pytest.mark.parametrize("cap", [None, 0, 0.005])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)], ids=["f64", "f32"]
)
def test_trains_what_one_process_trains(
    dtype: torch.dtype, tolerance: float, cap: float | None, as_view: bool
) -> None:
    alone = network(0, dtype)
    model = DDP(network(dist.get_rank(), dtype), bucket_cap_mb=cap, gradient_as_bucket_view=as_view)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    reference = torch.optim.SGD(alone.parameters(), lr=0.05, momentum=0.9)
    for step, (x, y) in enumerate(batches(4, dtype)):
        reference.zero_grad()
        F.cross_entropy(alone(x), y).backward()
        reference.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        F.cross_entropy(model(mine(x)), mine(y)).backward()
        optimizer.step()
    parallel_assert(distance(model, alone) <= tolerance, lambda: f"off by {distance(model, alone)}")
    assert_equal_everywhere(list(model.parameters()))


@pytest.mark.parametrize("as_view", [False, True], ids=["copies", "views"])
def test_no_sync_accumulates_and_the_next_backward_averages_the_sum(as_view: bool) -> None:
    model = DDP(network(0), gradient_as_bucket_view=as_view)
    alone = network(0)
    for x, y in batches(3):
        model.zero_grad()
        alone.zero_grad()
        for x_part, y_part in zip(x.split(BATCH // 2), y.split(BATCH // 2), strict=True):
            F.cross_entropy(alone(x_part), y_part).backward()
        (x1, x2), (y1, y2) = x.split(BATCH // 2), y.split(BATCH // 2)
        with model.no_sync():
            F.cross_entropy(model(mine(x1)), mine(y1)).backward()
        local = [g.clone() for g in grads(model)]
        parallel_assert(
            dist.get_world_size() == 1 or not all_close(local, averages(local)),
            "gradients were averaged under no_sync",
        )
        F.cross_entropy(model(mine(x2)), mine(y2)).backward()
        parallel_assert(all_close(grads(model), grads(alone)))
    assert_equal_everywhere(grads(model))


def test_no_sync_goes_by_where_forward_ran() -> None:
    model, x = DDP(network(dist.get_rank())), mine(batches(1)[0][0])
    with model.no_sync():
        inside = model(x).square().sum()
    inside.backward()
    local = [g.clone() for g in grads(model)]
    expected = network(0)
    expected(x).square().sum().backward()
    parallel_assert(all_close(local, grads(expected)))
    model.zero_grad()
    outside = model(x).square().sum()
    with model.no_sync():
        outside.backward()
    wanted = averages(local)
    parallel_assert(all_close(grads(model), wanted))
    parallel_assert(model.require_backward_grad_sync)


def test_two_forwards_before_one_backward_and_before_two() -> None:
    model, x = DDP(network(0)), mine(batches(1)[0][0])
    alone = network(0)
    (alone(x).square().sum() + alone(2 * x).square().sum()).backward()
    expected = averages(grads(alone))
    (model(x).square().sum() + model(2 * x).square().sum()).backward()
    parallel_assert(all_close(grads(model), expected))
    model.zero_grad()
    first, second = model(x).square().sum(), model(2 * x).square().sum()
    first.backward()
    second.backward()
    parallel_assert(all_close(grads(model), expected))


def test_backward_twice_through_one_forward() -> None:
    model, x = DDP(network(0)), mine(batches(1)[0][0])
    loss = model(x).square().sum()
    loss.backward(retain_graph=True)
    once = [g.clone() for g in grads(model)]
    loss.backward()
    parallel_assert(all_close(grads(model), [2 * g for g in once]))


def test_the_bare_module_stays_local() -> None:
    model, x = DDP(network(0)), mine(batches(1)[0][0])
    model(x).square().sum().backward()
    model.zero_grad()
    # One rank alone: if this communicated, it would wait for ever.
    if dist.get_rank() == 0:
        model.module(x).square().sum().backward()
    parallel_assert((model.module[0].weight.grad is not None) == (dist.get_rank() == 0))
    model.zero_grad()
    model(x).square().sum().backward()
    assert_equal_everywhere(grads(model))


def test_outputs_that_are_not_tensors_or_are_parameters() -> None:
    class Hidden:
        def __init__(self, loss: torch.Tensor) -> None:
            self.loss = loss

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, wrap: bool) -> Hidden | tuple:
            # Neither shows the reducer a tensor that leads to the loss.
            loss = (dist.get_rank() + 1) * self.weight.sum()
            return Hidden(loss) if wrap else (self.weight, None, 3)

    model = DDP(Odd())
    average = torch.full((3,), (dist.get_world_size() + 1) / 2)
    model(True).loss.backward()
    parallel_assert(torch.equal(model.module.weight.grad, average))
    model.zero_grad()
    weight, _, _ = model(False)
    ((dist.get_rank() + 1) * weight.sum()).backward()
    parallel_assert(torch.equal(model.module.weight.grad, average))
    parallel_assert(not model.module.weight._backward_hooks, "a hook stays on the parameter")


def test_autograd_grad_leaves_the_reducer_alone() -> None:
    model = DDP(network(0))
    x = mine(batches(1)[0][0]).clone().requires_grad_()
    # A gradient penalty: differentiates with respect to the input, then through that.
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    (model(x).square().sum() + slope.square().sum()).backward()
    alone = network(0)
    (slope,) = torch.autograd.grad(alone(x).sum(), x, create_graph=True)
    (alone(x).square().sum() + slope.square().sum()).backward()
    parallel_assert(all_close(grads(model), averages(grads(alone))))


class Branches(nn.Module):
    """Uses its two layers in an order that depends on the rank."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> dict[str, list[torch.Tensor]]:
        first, second = self.one, self.two
        if dist.get_rank() % 2:
            first, second = second, first
        return {"nested": [second(torch.tanh(first(x)))]}


@pytest.mark.parametrize("cap", [0, None])
def test_ranks_may_produce_gradients_in_different_orders(cap: float | None) -> None:
    torch.manual_seed(0)
    model = DDP(Branches(), bucket_cap_mb=cap)
    x = torch.full((2, 6), float(dist.get_rank() + 1))
    with model.no_sync():
        model(x)["nested"][0].square().sum().backward()
    expected = averages(grads(model))
    model.zero_grad()
    model(x)["nested"][0].square().sum().backward()
    parallel_assert(all_close(grads(model), expected))


def test_buckets_start_while_backward_runs() -> None:
    model = DDP(network(0), bucket_cap_mb=0)
    started: list[int] = []

    def look(_grad: torch.Tensor) -> None:
        started.append(sum(bucket.work is not None for bucket in model.reducer.buckets))

    first = model.module[0].weight.register_hook(look)
    model(mine(batches(1)[0][0])).square().sum().backward()
    first.remove()
    # The gradient of the first layer comes last; those of the two linear layers are on their way.
    parallel_assert(started and started[0] >= 4, lambda: f"only {started} buckets were started")
    parallel_assert(all(bucket.work is None for bucket in model.reducer.buckets))
    parallel_assert(model.communication_seconds > 0)


def test_default_buckets_begin_and_end_small() -> None:
    layers = nn.Sequential(*[nn.Linear(512, 512, bias=False) for _ in range(8)])  # 1 MiB each

    def members(**arguments: Any) -> list[list[int]]:
        return Schedule.members(DDP(layers, **arguments).reducer.buckets)

    # And end small: none is larger than half of what was left.
    parallel_assert(members() == [[7], [6, 5, 4, 3], [2, 1], [0]])
    parallel_assert(members(bucket_cap_mb=3) == [[7, 6, 5], [4, 3, 2], [1, 0]])


@pytest.mark.parametrize("set_to_none", [False, True])
def test_gradients_are_views_of_the_buckets(set_to_none: bool) -> None:
    model, x = DDP(network(0), gradient_as_bucket_view=True), mine(batches(1)[0][0])
    for _ in range(3):
        model.zero_grad(set_to_none=set_to_none)
        model(x).square().sum().backward()
        (bucket,) = model.reducer.buckets
        storage = bucket.buffer.untyped_storage().data_ptr()
        parallel_assert(all(g.untyped_storage().data_ptr() == storage for g in grads(model)))
    alone = network(0)
    alone(x).square().sum().backward()
    parallel_assert(all_close(grads(model), averages(grads(alone))))


class Shared(nn.Module):
    """One layer used twice, and a weight that is two parameters' worth of module."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out = nn.Linear(5, 5), nn.Linear(5, 5)
        self.out.weight = self.layer.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.layer(torch.tanh(self.layer(x)))))


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x)
        x = checkpoint(self.layers[1], x, use_reentrant=self.reentrant)
        return self.layers[2](torch.tanh(x))


@pytest.mark.parametrize("cap", [0, None])
@pytest.mark.parametrize(
    "build",
    [Shared, lambda: Checkpointed(True), lambda: Checkpointed(False)],
    ids=["shared", "reentrant-checkpoint", "checkpoint"],
)
def test_unusual_graphs(build: Callable[[], nn.Module], cap: float | None) -> None:
    torch.manual_seed(0)
    model = DDP(build(), bucket_cap_mb=cap)
    x = torch.full((2, 5), float(dist.get_rank() + 1))
    for _ in range(2):
        model.zero_grad()
        with model.no_sync():
            model(x).square().sum().backward()
        expected = averages(grads(model))
        model.zero_grad()
        model(x).square().sum().backward()
        parallel_assert(all_close(grads(model), expected))


class NoGradient(torch.autograd.Function):
    """Passes its input on; the gradient is undefined on odd ranks."""

    @staticmethod
    def forward(ctx, x):  # noqa: ANN001, ANN205
        return x.clone()

    @staticmethod
    def backward(ctx, grad):  # noqa: ANN001, ANN205
        return None if dist.get_rank() % 2 else grad


def test_an_undefined_gradient_counts_as_zeros() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))

        def forward(self) -> torch.Tensor:
            return (NoGradient.apply(self.a) + self.b).sum()

    model = DDP(Half())
    model().backward()
    size = dist.get_world_size()
    share = (size + 1) // 2 / size
    parallel_assert(torch.allclose(model.module.a.grad, torch.full((3,), share)))
    parallel_assert(torch.equal(model.module.b.grad, torch.ones(3)))
