"""Training side by side: one process, hpcdist's DDP, and torch's DDP over gloo."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from gloo import gloo_world
from torch import nn

import hpcdist as dist
from hpcdist.parallel.reducer import schedule
from hpcdist.testing import parallel_assert

DDP = dist.DistributedDataParallel
TorchDDP = nn.parallel.DistributedDataParallel


class SpareNet(nn.Module):
    """Three layers, of which a pass may leave out the last one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first, self.last, self.spare = (nn.Linear(2, 2) for _ in range(3))

    def forward(self, x: torch.Tensor, whole: bool = True) -> torch.Tensor:
        y = self.last(torch.tanh(self.first(x)))
        return self.spare(y) if whole else y


def part_of(batch: Any, rank: int) -> Any:
    """One rank's part of a global batch."""
    if isinstance(batch, tuple):
        return tuple(part_of(part, rank) for part in batch)
    return batch.chunk(dist.get_world_size())[rank]


def mine(batch: Any) -> Any:
    """This rank's part of a global batch."""
    return part_of(batch, dist.get_rank())


def in_pieces(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Let DDP reduce its buckets in pieces of so many bytes on any number of ranks."""
    monkeypatch.setattr(schedule, "_PIECE", size)
    monkeypatch.setattr(schedule, "_SHARE", 1)


def grads(module: nn.Module) -> list[torch.Tensor | None]:
    return [p.grad for p in module.parameters()]


def distance(one: nn.Module, other: nn.Module) -> float:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max(((a - b).abs().max().item() for a, b in pairs if a.numel()), default=0.0)


class Run:
    """One way to train: a module, its optimizer, and the losses so far."""

    def __init__(self, module: nn.Module, optimizer: Callable[[Any], Any]) -> None:
        self.module = module
        self.optimizer = optimizer(module.parameters())
        self.losses: list[float] = []

    def step(self, loss_of: Callable[[nn.Module, Any], torch.Tensor], *parts: Any) -> None:
        """Train with the mean of the parts' losses and gradients."""
        self.optimizer.zero_grad()
        self.losses.append(0.0)
        for part in parts:
            loss = loss_of(self.module, part)
            loss.backward()
            self.losses[-1] += loss.item() / len(parts)
        for parameter in self.module.parameters() if len(parts) > 1 else ():
            if parameter.grad is not None:
                parameter.grad /= len(parts)
        self.optimizer.step()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def side_by_side(
    build: Callable[[], nn.Module],
    loss_of: Callable[[nn.Module, Any], torch.Tensor],
    batches: Sequence[Any],
    *,
    optimizer: Callable[[Any], Any] = sgd,
    alone: bool = True,
    torch_too: bool = True,
    tolerance: float = 1e-6,
    by_rank: bool = False,
    of_module: Callable[[nn.Module], dict[str, Any]] = lambda module: {},
    then: Callable[[Any], Any] = lambda model: model,
    **arguments: Any,
) -> nn.Module:
    """Train the same module in three ways, and compare parameters and losses after each step.

    `build` must give the same module each time; `loss_of` a mean over the batch, so that the mean
    over ranks is the loss of the whole batch; or, with `by_rank`, one process takes the mean over
    all ranks' parts. Arguments that need the module come from `of_module`, and `then`
    makes of each wrapper what is trained. Returns hpcdist's.
    """
    gloo_world()

    def wrapped(kind: Callable[..., nn.Module]) -> nn.Module:
        module = build()
        return then(kind(module, **arguments, **of_module(module)))

    ours = Run(wrapped(DDP), optimizer)
    runs = {"ours": ours}
    if torch_too:
        runs["torch"] = Run(wrapped(TorchDDP), optimizer)
    single = Run(build(), optimizer) if alone else None
    for number, batch in enumerate(batches):
        for run in runs.values():
            run.step(loss_of, mine(batch))
        losses = torch.tensor(ours.losses[-1:], dtype=torch.float64)
        dist.all_reduce(losses, dist.ReduceOp.AVG)
        if single is not None:
            ranks = range(dist.get_world_size())
            single.step(loss_of, *([part_of(batch, r) for r in ranks] if by_rank else [batch]))
            off = abs(losses.item() - single.losses[-1])
            parallel_assert(
                off <= 10 * tolerance * max(1, abs(single.losses[-1])),
                f"step {number}: loss off by {off}",
            )
            parallel_assert(
                distance(ours.module, single.module) <= tolerance,
                f"step {number}: off by {distance(ours.module, single.module)} from one process",
            )
        if torch_too:
            other = runs["torch"]
            off = abs(ours.losses[-1] - other.losses[-1])
            parallel_assert(off <= 10 * tolerance, f"step {number}: loss off by {off} from torch")
            parallel_assert(
                distance(ours.module, other.module) <= tolerance,
                f"step {number}: off by {distance(ours.module, other.module)} from torch",
            )
    return ours.module


class Boom(Exception):
    """Raised in the middle of a backward pass."""


def explode(*_tensors: torch.Tensor) -> None:
    """Raise it: a hook of a tensor or a node."""
    raise Boom


def boom_if(fails: bool) -> contextlib.AbstractContextManager[Any]:
    """Expect it on the ranks that fail."""
    return pytest.raises(Boom) if fails else contextlib.nullcontext()
