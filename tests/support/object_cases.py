"""Objects that the tests of object collectives send, and how they are compared."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import pathlib
from datetime import timedelta

import numpy as np
import torch

import hpcdist as dist
from hpcdist.testing import parallel_assert


@dist.register_object_type
@dataclasses.dataclass
class Config:
    lr: float
    layers: list


class Unknown:
    pass


def objects(rank: int) -> list:
    """Objects of one rank: of every kind, and of sizes from nothing to a megabyte."""
    return [
        None, True, rank, -(10 ** (30 * rank)), 0.1 * rank, complex(rank, 1), f"rank {rank} ä",
        b"\0" * rank, bytearray(b"x"), [1] * rank, (rank, [rank]), {"rank": rank, 3: None},
        {rank, "s"}, frozenset({rank}), slice(rank), torch.float16, torch.device("cpu"),
        torch.Size([rank, 2]), timedelta(seconds=rank), np.float32(rank), range(rank),
        collections.OrderedDict(a=rank), collections.Counter("ab" * rank),
        argparse.Namespace(rank=rank, path=pathlib.Path(str(rank))),
        collections.deque([rank], 3), dist.DebugLevel.INFO,
        Config(0.1 * rank, [rank, {"deep": [rank]}]),
        "large " * (200_000 if rank % 2 else 1),
    ]  # fmt: skip


def arrays(rank: int) -> dict:
    """Arrays and tensors of one rank, of sizes that differ between ranks."""
    return {
        "np": np.arange(10 * rank, dtype=np.int16).reshape(rank, 10),
        "torch": torch.full((rank + 1, 3), float(rank), dtype=torch.bfloat16),
        "empty": torch.empty(0, 5),
        "big": torch.arange(50_000 * (rank % 2) + 1),
    }


def equal(a, b) -> bool:
    """Whether two objects with arrays in them are alike, types included."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    return a == b


def still_in_step() -> None:
    """Fail on all ranks when object collectives no longer match."""
    held = [None] * dist.get_world_size()
    dist.all_gather_object(held, dist.get_rank())
    parallel_assert(held == list(range(dist.get_world_size())), lambda: f"out of step: {held}")
