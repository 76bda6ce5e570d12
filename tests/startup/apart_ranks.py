"""What ranks that are apart from each other compute: started by test_apart.py."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from datetime import timedelta

import numpy as np

import hpcdist as dist

#: Elements: in the check, in the library's first message, and where ranks would copy directly.
SIZES = (2, 1000, 200_000)


def say(text: str) -> None:
    os.write(1, f"{text}\n".encode())


def right(rank: int, size: int) -> None:
    before, after = (rank - 1) % size, (rank + 1) % size
    for n in SIZES:
        total = np.full(n, rank + 1.0)
        dist.all_reduce(total)
        assert bool((total == size * (size + 1) / 2).all()), f"all_reduce of {n}"
        base, got = np.arange(n), np.zeros(n, np.int64)
        sent = dist.isend(base * (rank + 1), after)
        dist.recv(got, before)
        sent.wait()
        assert np.array_equal(got, base * (before + 1)), f"message of {n}"
        every = np.zeros(size * n, np.int64)
        dist.all_gather_into_tensor(every, base * (rank + 1))
        wanted = np.concatenate([base * (r + 1) for r in range(size)])
        assert np.array_equal(every, wanted), f"gather of {n}"
        dist.all_to_all_single(every, np.concatenate([base + r for r in range(size)]))
        assert np.array_equal(every, np.tile(base + rank, size)), f"all_to_all of {n}"
    world = dist.group.WORLD
    assert world is not None
    block = world.carrier.share(8 * 300_000)
    memory = np.zeros(300_000) if block is None else np.frombuffer(block)
    memory[:] = rank + 1.0
    dist.all_reduce(memory)
    assert (memory == size * (size + 1) / 2).all(), "symmetric"
    part = dist.new_group([0, 1])
    if rank < 2:
        assert dist.get_world_size(part) == 2
        dist.barrier(part)
    if "windows" in sys.argv:
        windows(rank, size)
    objects = [None] * size
    dist.all_gather_object(objects, "x" * 100_000 + str(rank))
    assert objects == ["x" * 100_000 + str(r) for r in range(size)]


def windows(rank: int, size: int) -> None:
    import torch

    memory = dist.full((300_000,), rank + 1.0)
    window = dist.group.WORLD.new_window(memory)
    dist.barrier()
    window.accumulate(torch.ones(300_000), (rank + 1) % size)
    dist.barrier()
    assert bool((memory == rank + 2.0).all()), "window"


def main() -> None:
    began = time.monotonic()
    dist.init_process_group(timeout=timedelta(seconds=20))
    rank, size = dist.get_rank(), dist.get_world_size()
    right(rank, size)
    time.sleep(0.4)  # several looks of the watchdog: no one has died
    dist.barrier()
    if "dies" in sys.argv:
        if rank == size - 1:
            ctypes.CDLL(None)._exit(7)  # without a word; no signal ends the first of a namespace
        try:
            dist.barrier()
        except dist.DistError as error:
            say(f"rank {rank}: {error}")
        sys.exit(3)
    node = dist.group.WORLD.carrier.node_ranks
    dist.destroy_process_group()
    say(f"rank {rank} right, with {len(node)} on its node, in {time.monotonic() - began:.1f} s")


main()
