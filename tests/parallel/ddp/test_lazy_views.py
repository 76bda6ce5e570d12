"""Gradients, parameters and buffers that are lazily conjugated or negated views."""

from __future__ import annotations

import pytest
import torch
from ddp_cases import DDP
from torch import nn

import hpcdist as dist
from hpcdist.optim import ZeroRedundancyOptimizer
from hpcdist.parallel import averaging
from hpcdist.testing import parallel_assert

pytestmark = pytest.mark.ranks


class Net(nn.Module):
    """Each way to use a parameter gives it a gradient of another kind."""

    def __init__(self, size: int = 4) -> None:
        super().__init__()
        torch.manual_seed(4)
        make = lambda: nn.Parameter(torch.randn(size, size, dtype=torch.complex64))  # noqa: E731
        self.plain, self.conj, self.adjoint = make(), make(), make()
        self.real = nn.Parameter(torch.randn(size, size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        negated = torch.complex(self.real, self.real).conj().imag
        return ((self.plain + self.conj.conj() + self.adjoint.mH + negated) * x).sum().real


def batch(rank: int, size: int = 4) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(size, size, dtype=torch.complex64, generator=generator)


def test_the_gradients_are_of_these_kinds() -> None:
    net = Net()
    net(batch(0)).backward()
    kinds = [p.grad.is_conj() for p in (net.plain, net.conj, net.adjoint)]
    parallel_assert(any(kinds), "torch resolves them now: is there another way to make them?")


@pytest.mark.parametrize("size", [4, 300])
@pytest.mark.parametrize(
    "options",
    [{}, {"gradient_as_bucket_view": True}, {"static_graph": True},
     {"find_unused_parameters": True}],
    ids=["copies", "views", "static", "unused"],
)  # fmt: skip
def test_gradients(options: dict[str, bool], size: int) -> None:
    model, alone = DDP(Net(size), **options), Net(size)
    for step in range(3):
        model.zero_grad(set_to_none=step != 1), alone.zero_grad()
        model(batch(dist.get_rank(), size)).backward()
        for rank in range(dist.get_world_size()):
            (alone(batch(rank, size)) / dist.get_world_size()).backward()
        for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
            parallel_assert(torch.allclose(mine.grad, theirs.grad, atol=1e-5))


@pytest.mark.parametrize("size", [3, 600], ids=["small", "alone in its message"])
def test_parameters_and_buffers(size: int) -> None:
    """The values of rank 0 arrive, and the view stays one."""

    class Conjugated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            mine = complex(dist.get_rank() + 1, 2)
            self.weight = nn.Parameter(torch.full((size, size), mine).conj())
            self.register_buffer("shift", torch.full((size, size), mine).conj())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.shift.add_(dist.get_rank())
            return (self.weight * x + self.shift).sum().real

    model = DDP(Conjugated())
    parallel_assert(model.module.weight.is_conj() and model.module.shift.is_conj())
    for step in range(2):
        # rank 0 adds nothing, and the copy comes before this rank's own addition
        parallel_assert(model.module.weight[0, 0].item() == 1 - 2j)
        model(torch.ones(size, size)).backward()
        shift = model.module.shift[0, 0].item()
        parallel_assert(shift == 1 - 2j + dist.get_rank(), f"step {step}: {shift}")


def test_averages_and_zero() -> None:
    size = dist.get_world_size()
    lazy = nn.Parameter(torch.full((3,), complex(dist.get_rank(), 1)).conj())
    plain = nn.Parameter(torch.full((2,), complex(dist.get_rank(), 1)))
    averaging.average_parameters([lazy, plain])
    wanted = (size - 1) / 2
    parallel_assert(lazy.tolist() == [wanted - 1j] * 3 and plain.tolist() == [wanted + 1j] * 2)

    weights = [nn.Parameter(torch.full((3,), 1 + 1j).conj()) for _ in range(3)]
    optimizer = ZeroRedundancyOptimizer(weights, torch.optim.SGD, lr=0.5)
    for weight in weights:
        weight.grad = torch.full((3,), 1 + 1j).conj()
    optimizer.step()
    parallel_assert(all(weight.tolist() == [0.5 - 0.5j] * 3 for weight in weights))


class Shared(nn.Module):
    """Leaves the gradients of its parameters in one memory, if `factor` is 1."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
        self.whole = nn.Parameter(torch.zeros(4))

    def forward(self, x: torch.Tensor, factor: float) -> torch.Tensor:
        parts = torch.cat([self.one, self.other])
        return ((self.whole.view(4) + (parts if factor == 1 else factor * parts)) * x).sum()


@pytest.mark.parametrize("cap", [None, 0])
@pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])
def test_gradients_that_share_memory(view: bool, cap: float | None) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    alone = Shared()
    alone(torch.ones(4), 1).backward()
    pointers = {p.grad.untyped_storage().data_ptr() for p in alone.parameters()}
    parallel_assert(len(pointers) == 1, "torch parts them now: is there another way?")
    model = DDP(Shared(), gradient_as_bucket_view=view, bucket_cap_mb=cap)
    for _ in range(3):
        model.zero_grad()
        model(torch.full((4,), rank + 1.0), rank + 1).backward()
        ranks = torch.arange(1.0, size + 1)
        for p, wanted in zip(
            model.parameters(), (ranks.square(), ranks.square(), ranks), strict=True
        ):
            parallel_assert(torch.allclose(p.grad, wanted.mean()), f"{p.grad}, not {wanted.mean()}")


def test_gradients_that_share_memory_in_some_steps() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    model = DDP(Shared())
    ranks = torch.arange(1.0, size + 1)
    for step in range(6):
        model.zero_grad(set_to_none=step % 2 == 0)
        factor = rank + 1 if step % 3 else rank + 2
        model(torch.full((4,), rank + 1.0), factor).backward()
        factors = ranks if step % 3 else ranks + 1
        parts = (ranks * factors).mean()
        for p, wanted in zip(model.parameters(), (parts, parts, ranks.mean()), strict=True):
            parallel_assert(torch.allclose(p.grad, wanted), f"{p.grad}, not {wanted}")


def test_gradients_in_one_memory_side_by_side_stay_there() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    net = nn.Linear(3, 2)
    flat = torch.zeros(8)
    net.weight.grad, net.bias.grad = flat[:6].view(2, 3), flat[6:]
    model = DDP(net)
    for _ in range(2):
        model.zero_grad(set_to_none=False)
        model(torch.full((1, 3), rank + 1.0)).sum().backward()
        mean = (size + 1) / 2
        parallel_assert(flat.tolist() == pytest.approx([mean] * 6 + [1.0] * 2), f"{flat}")
