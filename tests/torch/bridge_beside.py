"""Groups of hpcdist's beside torch's default group, which is gloo's: what test_bridge.py starts.

HPCDIST_TIMEOUT=70 mpirun -n 2 python bridge_beside.py apart|again|turned|swapped|told
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as td

import hpcdist
import hpcdist.torch


def apart() -> None:
    """A group that torch makes has calls and a timeout of its own."""
    hpcdist.torch.init_process_group("gloo")
    hpcdist.init_process_group()
    given = timedelta(seconds=50)
    group, plain = (td.new_group(backend="hpcdist", timeout=t) for t in (given, None))
    assert hpcdist.torch.group(group).timeout == given
    assert hpcdist.group.WORLD.timeout == timedelta(seconds=70)  # HPCDIST_TIMEOUT
    assert hpcdist.torch.group(plain).timeout == timedelta(seconds=70)

    def reduce() -> None:
        for _ in range(100):
            td.all_reduce(torch.ones(3), group=group)

    thread = threading.Thread(target=reduce)
    thread.start()
    for _ in range(100):
        hpcdist.broadcast(torch.ones(2), 0)
    thread.join()


def again() -> None:
    """hpcdist is started twice, and gives its groups the same names."""
    hpcdist.torch.init_process_group("gloo")
    for _ in range(2):
        hpcdist.init_process_group()
        for group in (hpcdist.new_group([0, 1]), hpcdist.group.WORLD):
            x = torch.ones(1)
            td.all_reduce(x, group=hpcdist.torch.to_torch(group))
            assert x.item() == 2.0
        hpcdist.destroy_process_group()


def told() -> None:
    """A rank that MPI contradicts is an error on all: it was replaced without a word."""
    for backend in ("hpcdist", "gloo"):
        for rank, size in ((0, 2), (0, -1), (-1, 3)):
            try:
                td.init_process_group(backend, "mpi://", rank=rank, world_size=size)
            except (ValueError, hpcdist.DistMismatchError) as error:
                texts = (f"told rank={rank}, world_size={size}", "rank 1 gave init_process_group")
                assert any(text in str(error) for text in texts), error
            else:
                raise AssertionError(f"{backend} started with rank {rank} of {size}")
    hpcdist.torch.init_process_group("gloo")
    rank = td.get_rank()
    td.destroy_process_group()
    td.init_process_group("hpcdist", "mpi://", rank=rank, world_size=2)
    x = torch.ones(1)
    td.all_reduce(x)
    assert x.item() == 2.0 and td.get_rank() == rank


def turned() -> None:
    """torch has numbered the ranks otherwise: roots would be others."""
    hpcdist.init_process_group()
    rank = 1 - hpcdist.get_rank()
    port = int(os.environ["HPCDIST_TEST_PORT"])
    store = td.TCPStore("127.0.0.1", port, 2, rank == 0)
    td.init_process_group("gloo", store=store, rank=rank, world_size=2)
    pair = hpcdist.new_group([0, 1])
    calls: list[Callable[[], object]] = [
        lambda: td.new_group(backend="hpcdist"),
        lambda: td.new_group([rank], use_local_synchronization=True, backend="hpcdist"),
        lambda: hpcdist.torch.to_torch(pair),
        hpcdist.torch.to_torch,
    ]
    for call in calls:
        try:
            call()
        except ValueError as error:
            assert f"torch says rank {rank} of 2" in str(error), error
        else:
            raise AssertionError("not refused")


def swapped() -> None:
    """torch has numbered two of the ranks otherwise, and not the others: all are refused."""
    hpcdist.init_process_group()
    rank = {0: 0, 1: 2, 2: 1}[hpcdist.get_rank()]
    store = td.TCPStore("127.0.0.1", int(os.environ["HPCDIST_TEST_PORT"]), 3, rank == 0)
    td.init_process_group("gloo", store=store, rank=rank, world_size=3)
    whole = hpcdist.new_group([0, 1, 2])
    calls: list[Callable[[], object]] = [
        lambda: td.new_group(backend="hpcdist"),
        lambda: td.new_group(backend="hpcdist"),
        lambda: rank < 2 and td.new_group([0, 1], None, "hpcdist", None, True),
        lambda: hpcdist.torch.to_torch(whole),
        lambda: td.new_group([0], backend="hpcdist"),  # the same process on both sides
    ]
    refused = []
    for call in calls:
        begun = time.monotonic()
        try:
            call()
        except (ValueError, hpcdist.DistMismatchError) as error:
            assert "torch says rank" in str(error), error
            refused.append(True)
        else:
            refused.append(False)
        assert time.monotonic() - begun < 30
    assert refused == [True, True, rank < 2, True, False], refused
    store = td.PrefixStore("again", store)
    td.destroy_process_group()
    try:
        td.init_process_group("hpcdist", store=store, rank=rank, world_size=3)
    except ValueError as error:
        assert "torch says rank" in str(error), error
    else:
        raise AssertionError("not refused")


if __name__ == "__main__":
    {each.__name__: each for each in (apart, again, told, turned, swapped)}[sys.argv[1]]()
    if td.is_initialized():
        td.destroy_process_group()
    os.write(1, b"well\n")
