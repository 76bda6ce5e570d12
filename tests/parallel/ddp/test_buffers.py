"""Buffers between ranks: copies that autograd does not count, and transforms of torch.func."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from ddp_cases import DDP, TorchDDP
from gloo import gloo_world
from torch import nn

import hpcdist as dist
from hpcdist.parallel import (
    BufferCommHookLocation,
    MixedPrecision,
    SyncBatchNorm,
    averaging,
    sync,
)
from hpcdist.testing import parallel_assert, parallel_raises

pytestmark = pytest.mark.ranks


class Masked(nn.Module):
    """A constant that backward needs, beside a statistic that changes, small or large."""

    def __init__(self, count: int = 4) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layer = nn.Linear(4, 4)
        self.register_buffer("mask", torch.tensor([1.0, 0, 2, 1]))
        self.register_buffer("seen", torch.zeros(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.add_(dist.get_rank() + 1)
        return self.layer(x) * self.mask


def normed(norm: Callable[[int], nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 4), norm(4), nn.Tanh(), nn.Linear(4, 2))


MODULES = {
    "BatchNorm": lambda: normed(nn.BatchNorm1d),
    "SyncBatchNorm": lambda: normed(SyncBatchNorm),
    "a mask": Masked,
    "a large statistic": lambda: Masked(300_000),
}


def batch(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * dist.get_rank() + step)
    return torch.randn(8, 4, generator=generator)


def two_forwards(model: nn.Module) -> None:
    (model(batch(0)).square().sum() + model(batch(1)).square().sum()).backward()


def two_backwards(model: nn.Module) -> None:
    """As in a GAN: the graph of the first forward is used when the second has copied buffers."""
    with model.no_sync():
        first = model(batch(0)).square().sum()
        second = model(batch(1)).square().sum()
    second.backward()
    model(batch(2)).square().sum().backward()
    first.backward()


def evaluation_between(model: nn.Module) -> None:
    first = model(batch(0)).square().sum()
    model.eval()
    second = model(batch(1)).square().sum()
    model.train()
    (first + second + model(batch(2)).square().sum()).backward()


@pytest.mark.parametrize("use", [two_forwards, two_backwards, evaluation_between])
@pytest.mark.parametrize("name", list(MODULES))
def test_copies_of_buffers_do_not_count_as_changes(name: str, use: Callable) -> None:
    for options in ({}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}):
        model = DDP(MODULES[name](), **options)
        for _ in range(2):
            use(model)
        parallel_assert(all(p.grad.isfinite().all() for p in model.parameters()))


@pytest.mark.parametrize("name", ["BatchNorm", "a mask"])
def test_two_forwards_give_the_gradients_of_torch(name: str) -> None:
    gloo_world()
    models = DDP(MODULES[name]()), TorchDDP(MODULES[name]())
    for model in models:
        for _ in range(3):
            two_forwards(model)
    for ours, theirs in zip(*(m.parameters() for m in models), strict=True):
        parallel_assert(torch.allclose(ours.grad, theirs.grad, atol=1e-5))
    for ours, theirs in zip(*(m.buffers() for m in models), strict=True):
        parallel_assert(torch.allclose(ours, theirs, atol=1e-5))


def test_with_mixed_precision() -> None:
    settings = MixedPrecision(torch.bfloat16, torch.float32, torch.bfloat16)
    model = DDP(Masked(), mixed_precision=settings)
    two_forwards(model)
    parallel_assert(model.module.layer.weight.grad.isfinite().all())


def test_with_a_hook_and_in_join() -> None:
    model = DDP(Masked())

    def scaled(state: None, buffers: dict[str, torch.Tensor]) -> None:
        for buffer in buffers.values():
            dist.broadcast(buffer, 0)
            buffer.mul_(1)

    model._register_buffer_comm_hook(None, scaled, BufferCommHookLocation.PRE_FORWARD)
    two_forwards(model)

    model, weight = DDP(Masked()), torch.ones(4, requires_grad=True)
    with model.join():
        for _ in range(1 + dist.get_rank()):
            with model.no_sync():
                first = model(batch(0)).square().sum()
            (first + model(batch(1)).square().sum()).backward()
        kept = (weight * model.module.mask).sum()
    kept.backward()  # buffers were copied at the end of join


def test_averaging_buffers_does_not_count_either() -> None:
    module = normed(nn.BatchNorm1d).eval()
    result = module(batch(0)).square().sum()
    averaging.average_parameters(b for b in module.buffers() if b.is_floating_point())
    result.backward()
    parallel_assert(module[0].weight.grad.isfinite().all())


def test_a_change_by_the_module_itself_still_counts() -> None:
    class Changing(Masked):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result = super().forward(x)
            self.mask.add_(1)
            return result

    with parallel_raises(RuntimeError, match="modified by an inplace operation"):
        DDP(Changing())(batch(0)).sum().backward()


def test_a_buffer_made_in_inference_mode() -> None:
    module = Masked()
    with torch.inference_mode():
        module.register_buffer("offset", torch.full((2,), float(dist.get_rank())))
    DDP(module)(batch(0)).sum().backward()
    parallel_assert(module.offset.tolist() == [0, 0])


@pytest.mark.mpi(min_size=2)
def test_inside_a_transform_of_torch_func() -> None:
    def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
        parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())

        def loss(values: dict[str, torch.Tensor]) -> torch.Tensor:
            return torch.func.functional_call(model, (values, buffers), (batch(0),)).sum()

        return torch.func.grad(loss)(parameters)

    with parallel_raises(TypeError, match="forward_sync_buffers=False"):
        gradients(DDP(normed(nn.BatchNorm1d).eval()))
    found = gradients(DDP(normed(nn.BatchNorm1d).eval(), forward_sync_buffers=False))
    parallel_assert(all(gradient.isfinite().all() for gradient in found.values()))


class Resized(nn.Module):
    """Buffers whose shapes the module changes, though not how many numbers they have in all."""

    def __init__(self, shapes: list[tuple[int, ...]]) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.one, self.two = nn.Buffer(torch.zeros(2)), nn.Buffer(torch.zeros(3))
        self._shapes = shapes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.one, self.two = (torch.full(shape, 1.0) for shape in self._shapes)
        return self.layer(x)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("other", [[(3,), (2,)], [(2, 1), (3,)], [(700, 800), (3,)]])
def test_buffers_that_have_other_shapes_on_a_rank(other: list[tuple[int, ...]]) -> None:
    """Each rank would cut the same numbers in its own way."""
    here = [(800, 700), (3,)] if other[0] == (700, 800) else [(2,), (3,)]
    model = DDP(Resized(other if dist.get_rank() == dist.get_world_size() - 1 else here))
    model(torch.ones(1, 2)).sum().backward()
    with parallel_raises(dist.DistMismatchError, match="DistributedDataParallel buffers"):
        model(torch.ones(1, 2))
    same = DDP(Resized(other))
    for _ in range(2):
        same(torch.ones(1, 2)).sum().backward()
    parallel_assert(tuple(same.module.one.shape) == other[0])


@pytest.mark.mpi(min_size=2)
def test_buffers_that_each_rank_keeps_for_itself() -> None:
    shape = (1 + dist.get_rank(),)
    module = nn.Linear(2, 2)
    module.own = nn.Buffer(torch.zeros(shape))
    model = DDP(module, broadcast_buffers=False)
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()
    parallel_assert(tuple(module.own.shape) == shape)
    with parallel_raises(dist.DistMismatchError, match="buffer 'own'"):
        DDP(module, forward_sync_buffers=False)  # copied once


@pytest.mark.mpi(min_size=2)
def test_forwards_of_the_same_buffers_digest_their_shapes_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With 100 small buffers that took a tenth of each copy."""
    seen = []
    monkeypatch.setattr(sync, "digest", lambda *facts: seen.append(facts) or len(seen))
    sync._digest.cache_clear()
    model = DDP(Resized([(2,), (3,)]))
    before = len(seen)
    for _ in range(3):
        model(torch.ones(1, 2)).sum().backward()
    parallel_assert(len(seen) == before + 1, f"{seen}")
    model.module._shapes = [(2, 1), (3,)]
    for _ in range(3):
        model(torch.ones(1, 2)).sum().backward()
    parallel_assert(len(seen) == before + 2, f"{seen}")
    sync._digest.cache_clear()


def test_all_ranks_copy_buffers_in_the_first_forward_after_a_death() -> None:
    """They differ in whether they would: some had a forward that failed, a former spare none."""
    group = dist.new_group()
    model, x = DDP(normed(nn.BatchNorm1d), process_group=group), torch.ones(3, 4)
    model(x).sum().backward()
    with torch.no_grad():
        model(x)
    parallel_assert(not model.will_sync_module_buffers())
    group.members = replace(group.members, generation=group.members.generation + 1)
    parallel_assert(model.will_sync_module_buffers())
    with torch.no_grad():
        model(x)
    parallel_assert(not model.will_sync_module_buffers())


class Late(nn.Module):
    """Its buffers come with the first forward: one had no value, one no name."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layer = nn.Linear(4, 4)
        self.register_buffer("center", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen_here = (self.center, getattr(self, "spread", None))
        self.center = x.detach().mean(0)
        self.register_buffer("spread", x.detach().std(0))
        return self.layer(x)


def test_buffers_that_come_with_the_first_forward() -> None:
    """Torch looks for buffers at each forward, too."""
    model, expected = DDP(Late()), [batch(0).mean(0), batch(0).std(0)]
    for tensor in expected:
        dist.broadcast(tensor, 0)
    for step in range(2):
        model(batch(step)).sum().backward()
    found = model.module.seen_here
    parallel_assert(all(map(torch.equal, found, expected)), "not those of rank 0")
