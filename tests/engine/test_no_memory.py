"""A rank without memory for a call says so before the others begin it: nobody waits for it."""

from __future__ import annotations

import ctypes
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from worlds import between_nodes

import hpcdist as dist
from hpcdist.testing import parallel_assert

pytestmark = [pytest.mark.ranks, pytest.mark.mpi(min_size=2)]

#: Seconds: the timeout; the most that a rank may wait.
LONG, SOON = 20, 5
#: More than a piece: a rank that scales its input first has a copy of a piece.
COUNT = 3 << 20


@contextmanager
def no_memory() -> Iterator[None]:
    """Leave this process no piece of memory that a staging buffer would fit in."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    _, hard = limits = resource.getrlimit(resource.RLIMIT_AS)
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    libc.free.argtypes = [ctypes.c_void_p]
    blocks: list[int] = []
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize(), hard))
    try:
        while block := libc.malloc(ctypes.c_size_t(4 << 20)):  # what the allocator has kept
            blocks.append(block)
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
        for block in blocks:
            libc.free(block)


def test_a_rank_without_memory_to_scale_its_input_is_named_at_once() -> None:
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    group = between_nodes(timedelta(seconds=LONG))
    tensor = torch.ones(COUNT)
    text = ""
    dist.barrier(group)
    began = time.monotonic()
    try:
        with no_memory() if rank == last else nullcontext():
            dist.reduce(tensor, group_dst=0, op=dist.ReduceOp.PREMUL_SUM(2.0), group=group)
    except (dist.DistError, MemoryError) as error:
        text = f"{type(error).__name__}: {error}"
    took = time.monotonic() - began
    kind = "MemoryError" if rank == last else "DistBackendError"
    parallel_assert(text.startswith(kind) and "no memory for a staging buffer" in text, text)
    parallel_assert(rank == last or f"rank {last}" in text, text)
    parallel_assert(took < SOON, f"{took:.1f} s")
    parallel_assert(bool((tensor == 1).all()))
    dist.reduce(tensor, group_dst=0, op=dist.ReduceOp.PREMUL_SUM(2.0), group=group)
    parallel_assert(rank > 0 or tensor[0].item() == 2.0 * (last + 1), f"{tensor[:3]}")
    dist.destroy_process_group(group)
