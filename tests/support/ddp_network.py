"""A small network and its data, and what DDP should make of its gradients."""

from __future__ import annotations

import hashlib

import torch
from torch import nn

import hpcdist as dist
from hpcdist.testing import parallel_assert

BATCH = 24  # divides by 1, 2, 3 and 4 ranks


def network(seed: int, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(144, 20), nn.Tanh(), nn.Linear(20, 5)
    ).to(dtype)


def batches(steps: int, dtype: torch.dtype = torch.float64) -> list[tuple]:
    generator = torch.Generator().manual_seed(11)
    return [
        (
            torch.randn(BATCH, 1, 8, 8, generator=generator, dtype=dtype),
            torch.randint(5, (BATCH,), generator=generator),
        )
        for _ in range(steps)
    ]


def assert_equal_everywhere(tensors: list[torch.Tensor]) -> None:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, digest.hexdigest())
    parallel_assert(len(set(everyone)) == 1, f"ranks differ: {everyone}")


def averages(gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    """What DDP should make of these, by the plain collective."""
    copies = [g.clone() for g in gradients]
    for copy in copies:
        dist.all_reduce(copy, op=dist.ReduceOp.AVG)
    return copies


def all_close(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.allclose(a, b) for a, b in zip(left, right, strict=True))
