"""torch.distributed over gloo beside hpcdist, in the same processes, to compare with."""

from __future__ import annotations

import atexit
import os
import tempfile
from datetime import timedelta

import torch.distributed as gloo

import hpcdist as dist

__all__ = ["gloo", "gloo_world"]


def gloo_world() -> None:
    """Start torch's default group with hpcdist's ranks, once per process.

    All ranks must call it. It stays up until the process ends, because starting it takes longer
    than most of what is compared with it.
    """
    if gloo.is_initialized():
        return
    path = [tempfile.mkdtemp(prefix="gloo-") if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(path)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = gloo.FileStore(os.path.join(path[0], "store"), dist.get_world_size())
    gloo.init_process_group(
        "gloo",
        store=store,
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        timeout=timedelta(seconds=30),
    )
    if dist.get_rank() == 0:
        atexit.register(_remove, path[0])


def _remove(folder: str) -> None:
    import shutil

    shutil.rmtree(folder, ignore_errors=True)
