"""Reconfigures torch's default group, though no rank dies; test_survivors.py runs it.

With a subgroup, wrong handles, a late rank, DDP modules of which one is a copy, and signal handlers
that raise at any moment of it.
"""

from __future__ import annotations

import copy
import faulthandler
import os
import random
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as td

import hpcdist
import hpcdist.torch
from hpcdist.groups.reconfigure import ReconfigureOptions

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from breaking import interrupting  # noqa: E402

ROUNDS = 25


def check(fine: bool, what: str) -> None:
    if not fine:
        raise AssertionError(f"rank {td.get_rank()}: {what}")


def refused(call, kind: type[Exception], text: str) -> None:
    try:
        call()
    except kind as error:
        check(text in str(error), f"{error}")
    else:
        check(False, f"no {kind.__name__} that says {text!r}")


def open_files() -> int:
    """Descriptors: a store for each time would have one, and six on rank 0."""
    return len(os.listdir("/proc/self/fd"))


def sums() -> None:
    tensor = torch.ones(3)
    td.all_reduce(tensor, group=td.new_group())
    check(tensor.tolist() == [td.get_world_size()] * 3, f"{tensor}")


def trained() -> list[torch.nn.Module]:
    """Two modules whose reducers have made their second buckets, which they keep."""
    module = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    both = [module, copy.deepcopy(module)]
    for each in both * 2:
        each(torch.ones(1, 2)).sum().backward()
    check(all(each._has_rebuilt_buckets for each in both), "no second buckets")
    return both


def main() -> None:
    faulthandler.dump_traceback_later(100, exit=True)
    hpcdist.torch.init_process_group(timeout=timedelta(seconds=20))
    world, rank = td.group.WORLD, td.get_rank()
    pair = td.new_group()
    check(not pair.supports_reconfigure, "a subgroup supports it")
    refused(pair.reconfigure, ValueError, "only the default group")
    wrong = ReconfigureOptions(handles=["x"] * td.get_world_size())
    refused(lambda: world.reconfigure(wrong), ValueError, "are not those of the ranks that live")
    handles: list[str] = [""] * td.get_world_size()
    td.all_gather_object(handles, world.get_reconfigure_handle())
    both = trained()
    world.reconfigure(ReconfigureOptions(handles=handles))
    check(not any(each._has_rebuilt_buckets for each in both), "a module has not followed")
    sums()
    if rank:  # rank 0 is late
        soon = timedelta(seconds=0.5)
        refused(lambda: world.reconfigure(timeout=soon), hpcdist.DistTimeoutError, "rank 0 is ")
    else:
        time.sleep(1)
    world.reconfigure()
    sums()
    began = time.monotonic()
    world.reconfigure()
    usual = time.monotonic() - began
    sums()
    raised, before = 0, open_files()
    with interrupting() as interrupted:
        for _ in range(ROUNDS):
            handle = world.get_reconfigure_handle()
            while world.get_reconfigure_handle() == handle:
                raised += bool(interrupted(world.reconfigure, random.uniform(0, 2 * usual)))
            sums()
    check(raised > 0, "no handler raised")
    check(open_files() <= before + 2, f"{open_files()} descriptors, and {before} before")
    td.destroy_process_group()
    print("ended", flush=True)


main()
