"""Windows in ordinary memory, which the other ranks reach by messages."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch

import hpcdist as dist


def window_of(group: Any, n: int, dtype: torch.dtype = torch.float32) -> tuple[Any, torch.Tensor]:
    """A window in ordinary memory, of zeros."""
    tensor = torch.zeros(n, dtype=dtype)
    return group.new_window(tensor), tensor


def within(seconds: float) -> dist.PutOptions:
    return dist.PutOptions(timeout=timedelta(seconds=seconds))


def all_received(group: Any) -> bool:
    """Whether no message of a group stays with MPI, within some seconds."""
    for _ in range(500):
        left = torch.tensor([group.carrier.unread])
        dist.all_reduce(left)
        if not int(left):
            return True
        time.sleep(0.01)
    return False
