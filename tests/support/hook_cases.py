"""A network, its training, and comparisons that the tests of communication hooks share."""

from __future__ import annotations

import torch
from gloo import gloo, gloo_world
from torch import nn

import hpcdist as dist
from hpcdist.testing import parallel_assert

STEPS = 6


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(108, 24), nn.Tanh(),
        nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 5),
    )  # fmt: skip


def data(rng) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """This rank's batches; rng is the same on all ranks, so each draws everything."""
    size, me = dist.get_world_size(), dist.get_rank()
    x = torch.from_numpy(rng.standard_normal((STEPS, size, 4, 1, 8, 8))).float()
    y = torch.from_numpy(rng.integers(0, 5, (STEPS, size, 4)))
    return [(x[step, me], y[step, me]) for step in range(STEPS)]


def train(model, batches, step=True, at=None):
    """Losses and parameters after training; `at(i, optimizer)` runs before each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for i, (x, y) in enumerate(batches):
        if at is not None:
            at(i)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        if step:
            optimizer.step()
        losses.append(loss.item())
    return torch.tensor(losses), [p.detach().clone() for p in model.parameters()]


def our_ddp(**options):
    return dist.DistributedDataParallel(network(), **options)


def their_ddp(**options):
    gloo_world()
    return nn.parallel.DistributedDataParallel(network(), **options)


def same_everywhere(parameters):
    flat = torch.cat([p.flatten() for p in parameters])
    low, high = flat.clone(), flat.clone()
    dist.all_reduce(low, dist.ReduceOp.MIN)
    dist.all_reduce(high, dist.ReduceOp.MAX)
    parallel_assert(torch.equal(low, high), "ranks differ")


def compare(found, wanted, tolerance=1e-6):
    for mine, reference in zip([found[0], *found[1]], [wanted[0], *wanted[1]], strict=True):
        off = (mine - reference).abs().max().item()
        parallel_assert(off <= tolerance, lambda off=off: f"off by {off}")


def powersgd(module, group=None, **options):
    options = {"start_powerSGD_iter": 2, "min_compression_rate": 1.1, **options}
    return module.PowerSGDState(group, **options)


def gathered(buffer):
    """All ranks' buffers over gloo, which knows neither bfloat16 nor its sum."""
    parts = [torch.empty_like(buffer).view(torch.uint8) for _ in range(dist.get_world_size())]
    gloo.all_gather(parts, buffer.view(torch.uint8))
    return [part.view(buffer.dtype) for part in parts]
