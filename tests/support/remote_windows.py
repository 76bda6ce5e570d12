"""Windows in ordinary memory, which the other ranks reach by messages."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from patience import wait_for

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


def pids_of_ranks() -> list[int]:
    """The process ids of all ranks; all must call it."""
    pids = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(pids, torch.tensor([os.getpid()]))
    return [int(pid) for pid in pids]


def stop(pid: int) -> None:
    """Stop a process: when this returns, none of its threads runs any more."""

    def stopped() -> bool:
        with suppress(OSError):  # a thread ends
            fields = [
                p.read_text().rpartition(")")[2] for p in Path(f"/proc/{pid}/task").glob("*/stat")
            ]
            return all(each.split()[0] in "Tt" for each in fields)
        return False

    os.kill(pid, signal.SIGSTOP)
    try:
        wait_for(stopped)
    except BaseException:
        os.kill(pid, signal.SIGCONT)
        raise
