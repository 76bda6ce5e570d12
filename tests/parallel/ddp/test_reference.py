"""One process, hpcdist's DistributedDataParallel, and torch's over gloo: equal training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ddp_cases import DDP, TorchDDP, distance, grads, mine, side_by_side
from gloo import gloo_world
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import hpcdist as dist
from hpcdist.testing import parallel_assert

pytestmark = pytest.mark.ranks

BATCH = 24  # divides by 1, 2, 3 and 4 ranks


class Net(nn.Module):
    """Convolution, a layer used twice, a shared weight, a scalar, and a channels-last parameter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.conv = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
        self.twice = nn.Linear(12, 12)
        self.tied = nn.Linear(12, 12)
        self.tied.weight = self.twice.weight
        self.scale = nn.Parameter(torch.ones(()))
        self.end = nn.Linear(12, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.conv(x)).flatten(1)
        x = torch.tanh(self.twice(torch.tanh(self.twice(x))))
        return self.end(torch.tanh(self.tied(x)) * self.scale)


def batches(steps: int = 4) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(11)
    return [
        (
            torch.randn(BATCH, 2, 4, 4, generator=generator),
            torch.randint(4, (BATCH,), generator=generator),
        )
        for _ in range(steps)
    ]


def cross_entropy(model: nn.Module, batch: Any) -> torch.Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y)


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"bucket_cap_mb": 0.0005},
        {"bucket_cap_mb_list": [0.001, 0.0001]},
        {"gradient_as_bucket_view": True},
        {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.0005},
        {"static_graph": True},
        {"static_graph": True, "gradient_as_bucket_view": True, "bucket_cap_mb": 0.0005},
        {"find_unused_parameters": True},
        {"find_unused_parameters": True, "gradient_as_bucket_view": True},
        {"batched_grad_copy": True},
        {"forward_sync_buffers": False},
    ],
    ids=lambda a: "-".join(a) or "default",
)
@pytest.mark.filterwarnings("ignore:find_unused_parameters=True was specified")
def test_with_every_flag(arguments: dict[str, Any]) -> None:
    side_by_side(Net, cross_entropy, batches(), **arguments)


def clip(parameter: torch.Tensor) -> None:
    parameter.grad.clamp_(-0.002, 0.002)


@pytest.mark.parametrize("when", ["before", "after", "between"])
@pytest.mark.parametrize("cap", [None, 0])
@pytest.mark.parametrize(
    "flags",
    [{}, {"gradient_as_bucket_view": True}, {"static_graph": True}],
    ids=["copies", "views", "static"],
)
def test_hooks_on_gradients_run_before_the_average(
    flags: dict[str, bool], cap: float | None, when: str
) -> None:
    """Registered before DDP wraps the module, after it, or between forward and backward."""

    def hooked(module: nn.Module) -> nn.Module:
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(clip)
        return module

    def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
        loss = cross_entropy(model, batch)
        if when == "between" and model not in seen:
            seen.append(hooked(model))
        return loss

    seen: list[nn.Module] = []
    side_by_side(
        lambda: hooked(Net()) if when == "before" else Net(),
        loss_of,
        batches(3),
        alone=False,
        then=hooked if when == "after" else lambda model: model,
        bucket_cap_mb=cap,
        **flags,
    )


@pytest.mark.parametrize("name", ["Adam", "Adagrad", "RMSprop"])
def test_with_other_optimizers(name: str) -> None:
    side_by_side(
        Net,
        cross_entropy,
        batches(3),
        optimizer=lambda p: getattr(torch.optim, name)(p, lr=0.003),
        tolerance=1e-5 if name == "Adam" else 1e-6,
    )


class Checkpointed(nn.Module):
    """Runs its blocks again in backward; with `often`, one of them in two checkpoints."""

    def __init__(self, reentrant: bool, often: bool = False) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.reentrant = reentrant
        self.order = [0, 1, 2, 1, 3] if often else [0, 1, 2, 3]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[self.order[0]](x)
        for index in self.order[1:]:
            x = torch.tanh(checkpoint(self.blocks[index], x, use_reentrant=self.reentrant))
        return x


def squares(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
@pytest.mark.parametrize("reentrant", [False, True], ids=["", "reentrant"])
def test_activation_checkpoints(reentrant: bool, static: bool) -> None:
    data = [torch.randn(BATCH, 8, generator=torch.Generator().manual_seed(3))] * 3
    often = static or not reentrant
    side_by_side(
        lambda: Checkpointed(reentrant, often),
        squares,
        data,
        static_graph=static,
        bucket_cap_mb=0.0001,
    )


def test_no_sync_over_several_backward_passes() -> None:
    gloo_world()
    ours, theirs, alone = DDP(Net()), TorchDDP(Net()), Net()
    data = batches(6)
    for first in (0, 3):
        for model in (ours, theirs, alone):
            model.zero_grad()
        for model in (ours, theirs):
            with model.no_sync():
                for x, y in data[first : first + 2]:
                    F.cross_entropy(model(mine(x)), mine(y)).backward()
            x, y = data[first + 2]
            F.cross_entropy(model(mine(x)), mine(y)).backward()
        for x, y in data[first : first + 3]:
            F.cross_entropy(alone(x), y).backward()
        for other in (theirs, alone):
            pairs = zip(grads(ours), grads(other), strict=True)
            parallel_assert(all(torch.allclose(a, b, atol=1e-6) for a, b in pairs))


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.layers = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


@pytest.mark.parametrize("sync", [True, False])
def test_buffers_are_those_of_torch(sync: bool) -> None:
    gloo_world()
    ours = DDP(Norm(), forward_sync_buffers=sync)
    theirs = TorchDDP(Norm(), forward_sync_buffers=sync)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(3):
        x = torch.randn(4, 6, generator=generator)
        for model in (ours, theirs):
            model(x).square().mean().backward()
        pairs = zip(ours.buffers(), theirs.buffers(), strict=True)
        parallel_assert(all(torch.allclose(a, b) for a, b in pairs))


def test_state_dicts_fit_both_ways() -> None:
    gloo_world()
    torch.manual_seed(dist.get_rank())
    ours, theirs = DDP(Norm()), TorchDDP(Norm())
    with torch.no_grad():
        for p in theirs.parameters():
            p.add_(1)
    parallel_assert(list(ours.state_dict()) == list(theirs.state_dict()))
    ours.load_state_dict(theirs.state_dict())
    parallel_assert(distance(ours, theirs) == 0)
    fresh = TorchDDP(Norm())
    fresh.load_state_dict(ours.state_dict())
    parallel_assert(distance(fresh, ours) == 0)
