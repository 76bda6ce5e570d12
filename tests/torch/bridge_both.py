"""hpcdist and torch.distributed in one program, in both orders: what test_bridge.py starts.

    mpirun -n 2 python bridge_both.py native|torch

Libraries ask torch.distributed.is_initialized() before they communicate.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as td
from torch import nn

import hpcdist
import hpcdist.torch


def library() -> float:
    """What a metric, or a layer, of a library does: local without torch's group, without a word."""
    x = torch.tensor([hpcdist.get_rank() + 1.0])
    if td.is_available() and td.is_initialized():
        td.all_reduce(x)
    return x.item()


def again(end: Callable[[], None]) -> None:
    """A view that one rank keeps does not decide what the next one is: ranks would differ in it."""
    pair = hpcdist.new_group([0, 1])
    kept = [td.group.WORLD, hpcdist.torch.to_torch(pair)] if hpcdist.get_rank() == 0 else []
    end()
    hpcdist.torch.init_process_group(timeout=timedelta(seconds=10))
    assert hpcdist.torch.group() is hpcdist.group.WORLD and td.group.WORLD not in kept
    assert hpcdist.group.WORLD.timeout == timedelta(seconds=10)
    views = [hpcdist.torch.to_torch(pair)]
    assert views[0] not in kept
    td.destroy_process_group(views[0])
    views.append(hpcdist.torch.to_torch(pair))
    for group in (None, views[1]):
        x = torch.ones(1)
        td.all_reduce(x, group=group)
        assert x.item() == 2.0
    hpcdist.destroy_process_group(pair)


def stores_go() -> None:
    """A store is closed when the next one is there: rank 0 had six descriptors more each time."""
    counts = []
    for turn in range(8):
        hpcdist.torch.init_process_group("hpcdist" if turn % 2 else "gloo")
        x = torch.ones(1)
        td.all_reduce(x)
        assert x.item() == 2.0
        td.destroy_process_group()
        counts.append(len(os.listdir("/proc/self/fd")))
    assert max(counts[4:]) <= max(counts[:4]), counts


def main(first: str) -> None:
    if first == "native":
        hpcdist.init_process_group()
        assert not td.is_initialized() and library() == hpcdist.get_rank() + 1.0
        hpcdist.group.WORLD.timeout = timedelta(seconds=25)
        hpcdist.torch.init_process_group()
        assert hpcdist.group.WORLD.timeout == timedelta(seconds=25)  # torch's side gives none
    else:
        hpcdist.torch.init_process_group()
    assert hpcdist.is_initialized() and td.is_initialized()
    size = hpcdist.get_world_size()
    assert (td.get_rank(), td.get_world_size()) == (hpcdist.get_rank(), size)
    assert library() == size * (size + 1) / 2
    assert hpcdist.torch.group() is hpcdist.group.WORLD
    assert hpcdist.torch.to_torch(hpcdist.group.WORLD) is td.group.WORLD
    theirs = td.new_group([0, 1])
    ours = hpcdist.torch.group(theirs)
    assert hpcdist.get_process_group_ranks(ours) == [0, 1]
    x, y = torch.ones(1), torch.ones(1)
    td.all_reduce(x, group=theirs)
    hpcdist.all_reduce(y, group=ours)
    assert x.item() == y.item() == 2.0
    model = nn.parallel.DistributedDataParallel(nn.Linear(2, 1))
    model(torch.full((1, 2), hpcdist.get_rank() + 1.0)).backward()
    assert model.module.weight.grad.tolist() == [[(size + 1) / 2] * 2]
    if first == "native":
        for end in (td.destroy_process_group, td.distributed_c10d._abort_process_group):
            again(end)
        td.destroy_process_group()
        assert hpcdist.is_initialized() and not td.is_initialized()
        hpcdist.barrier()
        hpcdist.destroy_process_group()
    else:
        td.destroy_process_group()
        assert not hpcdist.is_initialized()
        stores_go()
    os.write(1, b"well\n")


if __name__ == "__main__":
    main(sys.argv[1])
