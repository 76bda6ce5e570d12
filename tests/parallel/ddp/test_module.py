"""DistributedDataParallel and its module: kinds of parameters, buffers, state dicts, groups."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from ddp_cases import DDP, distance, grads, mine
from ddp_network import all_close, assert_equal_everywhere, averages, batches, network
from torch import nn

import hpcdist as dist
from hpcdist.testing import parallel_assert

pytestmark = pytest.mark.ranks


class Mixture(nn.Module):
    """Parameters of many kinds in one module."""

    def __init__(self) -> None:
        super().__init__()
        self.of_float32 = nn.Parameter(torch.randn(3))
        self.of_float64 = nn.Parameter(torch.randn(2, 2, dtype=torch.float64))
        self.of_bfloat16 = nn.Parameter(torch.randn(4).to(torch.bfloat16))
        self.of_complex64 = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.scalar = nn.Parameter(torch.randn(()))
        self.empty = nn.Parameter(torch.randn(0, 3))
        self.turned = nn.Parameter(torch.randn(4, 2).t())
        self.conv = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
        self.frozen = nn.Parameter(torch.randn(5), requires_grad=False)
        self.large = nn.Parameter(torch.randn(600_000))
        self.register_buffer("mask", torch.rand(7) > 0.5)
        self.register_buffer("steps", torch.randint(100, ()))
        self.register_buffer("strided", torch.rand(4, 6)[:, ::2])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        image = x.expand(1, 2, 4, 4)
        parts = [p.abs().square().sum() for p in self.parameters() if p.requires_grad]
        return sum(part.double() for part in parts) * x + self.conv(image).square().sum()


@pytest.mark.parametrize("as_view", [False, True], ids=["copies", "views"])
def test_parameters_of_many_kinds(as_view: bool) -> None:
    torch.manual_seed(100 + dist.get_rank())
    model = DDP(Mixture(), gradient_as_bucket_view=as_view)
    assert_equal_everywhere([*model.parameters(), *model.buffers()])
    torch.manual_seed(100)
    first = Mixture().state_dict()
    parallel_assert(all(torch.equal(v, first[k]) for k, v in model.module.state_dict().items()))
    x = torch.tensor(dist.get_rank() + 1.0)
    with model.no_sync():
        model(x).backward()
    trained = [p for p in model.parameters() if p.requires_grad]
    expected = averages([p.grad for p in trained])
    model.zero_grad()
    model(x).backward()
    assert_equal_everywhere([p.grad for p in trained])
    parallel_assert(all_close([p.grad for p in trained], expected))
    parallel_assert(model.module.frozen.grad is None)
    parallel_assert(len(model.reducer.buckets) >= 5)


def test_construction_copies_the_sign_of_zero() -> None:
    layer = nn.Linear(2, 2)
    with torch.no_grad():
        layer.bias.fill_(-0.0 if dist.get_rank() == 0 else 0.0)
    model = DDP(layer)
    parallel_assert(bool(torch.signbit(model.module.bias).all()))


def test_without_init_sync_nothing_is_copied() -> None:
    layer = nn.Linear(2, 2)
    with torch.no_grad():
        layer.weight.fill_(dist.get_rank())
    model = DDP(layer, init_sync=False)
    parallel_assert(bool((model.module.weight == dist.get_rank()).all()))


class Counting(nn.Module):
    """Counts its own training forwards, per rank, in buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("seen", torch.zeros(1))
        self.register_buffer("replaced", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += dist.get_rank() + 1
            self.replaced = self.replaced + dist.get_rank() + 1  # another tensor each time
        return self.layer(x)


@pytest.mark.parametrize("broadcast_buffers", [True, False])
def test_buffers_follow_rank_0(broadcast_buffers: bool) -> None:
    model, x = DDP(Counting(), broadcast_buffers=broadcast_buffers), torch.ones(1, 2)
    rank = dist.get_rank()
    for step in range(3):
        model(x).sum().backward()
        # What rank 0 had before this forward, and this rank's own addition.
        expected = step + (rank + 1) if broadcast_buffers else (step + 1) * (rank + 1)
        parallel_assert(model.module.seen.item() == expected, str(model.module.seen))
        parallel_assert(model.module.replaced.item() == expected)
    model.eval()
    with torch.no_grad():
        model(x)
        expected = 3 if broadcast_buffers else 3 * (rank + 1)
        parallel_assert(model.module.seen.item() == expected)
        # Nothing has changed them since, so evaluation may be uneven.
        for _ in range(rank):
            model(x)
    dist.barrier()


def test_batch_norm_trains_and_evaluates_alike_on_all_ranks() -> None:
    torch.manual_seed(dist.get_rank())
    model = DDP(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)))
    for _ in range(3):
        model(torch.randn(8, 4)).square().sum().backward()
    model.eval()
    first, second = model(torch.ones(2, 4)), model(torch.ones(2, 4))  # not modified in between
    (first.sum() + second.sum()).backward()
    assert_equal_everywhere([first, *model.buffers()])


def normed() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 2)).double()


SCRIPTED: dict[str, Callable[[], nn.Module]] = {
    "scripted": lambda: torch.jit.script(normed()),
    "traced": lambda: torch.jit.trace(normed(), torch.ones(3, 4).double()),
    "scripted child": lambda: nn.Sequential(torch.jit.script(normed())),
}


@pytest.mark.filterwarnings("ignore")  # torch.jit is deprecated, and says so many times
@pytest.mark.parametrize("kind", list(SCRIPTED))
def test_modules_of_torchscript(kind: str) -> None:
    for options in (
        {},
        {"find_unused_parameters": True, "gradient_as_bucket_view": True},
        {"static_graph": True, "broadcast_buffers": False},
    ):
        model, alone = DDP(SCRIPTED[kind](), **options), normed()
        for step in range(2):
            generator = torch.Generator().manual_seed(10 * dist.get_rank() + step)
            x = torch.randn(8, 4, generator=generator, dtype=torch.float64)
            for module in (model, alone):
                module.zero_grad()
                module(x).square().mean().backward()
            parallel_assert(all_close(grads(model), averages(grads(alone))), f"{options}")
            assert_equal_everywhere(grads(model))
        if "broadcast_buffers" not in options:
            model(torch.eye(4).double())  # changes rank 0's buffers, on all ranks
            assert_equal_everywhere(list(model.buffers()))


def test_state_dict_names_and_modes() -> None:
    model = DDP(network(0))
    parallel_assert(all(name.startswith("module.") for name in model.state_dict()))
    bare = {f"module.{k}": v for k, v in network(1).state_dict().items()}
    model.load_state_dict(bare)
    parallel_assert(torch.equal(model.module[0].weight, network(1)[0].weight))
    model.eval()
    parallel_assert(not model.module.training and not model.module[0].training)
    parallel_assert(model.train() is model and model.module[0].training)


def test_a_new_wrapper_takes_over_the_module() -> None:
    module, x = network(0), mine(batches(1)[0][0])
    before = DDP(module)
    reducer = before.reducer
    del before
    model = DDP(module)
    model(x).square().sum().backward()
    parallel_assert(reducer is not model.reducer and not reducer._running)
    assert_equal_everywhere(grads(model))
    del reducer, model
    if dist.get_rank() == 0:  # nobody listens any more
        module(x).square().sum().backward()
    dist.barrier()


def test_a_wrapper_that_is_gone_keeps_no_buckets() -> None:
    """They are as large as the model; to wait for a garbage collection may be too late."""
    gc.collect()
    gc.disable()
    try:
        wrapper = DDP(nn.Linear(3, 3))
        wrapper(torch.ones(2, 3)).sum().backward()
        reducer = weakref.ref(wrapper.reducer)
        del wrapper
        parallel_assert(reducer() is None)
    finally:
        gc.enable()


@pytest.mark.mpi(min_size=2)
def test_a_group_of_some_ranks() -> None:
    size = dist.get_world_size()
    members = list(range(1, size))
    group = dist.new_group(members)
    rank = dist.get_rank()
    if rank == 0:
        with pytest.raises(ValueError, match="not in the given group"):
            DDP(network(0), process_group=group)
    else:
        model = DDP(network(rank), process_group=group)
        first = network(1)
        assert distance(model, first) == 0
        x = mine(batches(1)[0][0])
        model(x).square().sum().backward()
        first(x).square().sum().backward()
        expected = grads(first)
        for gradient in expected:
            dist.all_reduce(gradient, op=dist.ReduceOp.AVG, group=group)
        assert all_close(grads(model), expected)
        dist.destroy_process_group(group)
    dist.barrier()


def test_a_group_of_one() -> None:
    groups = [dist.new_group([r]) for r in range(dist.get_world_size())]
    model = DDP(network(dist.get_rank()), process_group=groups[dist.get_rank()])
    alone = network(dist.get_rank())
    x = mine(batches(1)[0][0])
    model(x).square().sum().backward()
    alone(x).square().sum().backward()
    parallel_assert(distance(model, alone) == 0 and all_close(grads(model), grads(alone)))
    dist.destroy_process_group(groups[dist.get_rank()])
