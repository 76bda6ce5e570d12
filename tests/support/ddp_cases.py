"""Training side by side: one process, hpcdist's DDP, and torch's DDP over gloo."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as reference
from torch import nn

import hpcdist as dist
from hpcdist.testing import parallel_assert

DDP = dist.DistributedDataParallel
TorchDDP = nn.parallel.DistributedDataParallel


def torch_world() -> None:
    """Start torch.distributed over gloo beside hpcdist, once in the life of this process."""
    if reference.is_initialized():
        return
    where: list = [tempfile.mkdtemp(prefix="gloo-")] if dist.get_rank() == 0 else [None]
    dist.broadcast_object_list(where)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = reference.FileStore(str(Path(where[0]) / "store"), dist.get_world_size())
    reference.init_process_group(
        "gloo",
        store=store,
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        timeout=timedelta(seconds=30),
    )
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(where[0], ignore_errors=True)


def mine(batch: Any) -> Any:
    """This rank's part of a global batch."""
    if isinstance(batch, tuple):
        return tuple(mine(part) for part in batch)
    return batch.chunk(dist.get_world_size())[dist.get_rank()]


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

    def step(self, loss_of: Callable[[nn.Module, Any], torch.Tensor], batch: Any) -> None:
        self.optimizer.zero_grad()
        loss = loss_of(self.module, batch)
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.item())


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
    **arguments: Any,
) -> nn.Module:
    """Train the same module in three ways, and compare parameters and losses after each step.

    `build` must give the same module each time; `loss_of` a mean over the batch, so that the mean
    over ranks is the loss of the whole batch. Returns hpcdist's.
    """
    torch_world()
    ours = Run(DDP(build(), **arguments), optimizer)
    runs = {"ours": ours}
    if torch_too:
        runs["torch"] = Run(TorchDDP(build(), **arguments), optimizer)
    single = Run(build(), optimizer) if alone else None
    for number, batch in enumerate(batches):
        for run in runs.values():
            run.step(loss_of, mine(batch))
        losses = torch.tensor(ours.losses[-1:], dtype=torch.float64)
        dist.all_reduce(losses, dist.ReduceOp.AVG)
        if single is not None:
            single.step(loss_of, batch)
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
