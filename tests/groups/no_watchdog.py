"""Rank 1 cannot start the watchdog of a new world: no rank gets one, and all can try again.

no_watchdog.py [killed]: whether the last rank dies before. Start it as tests/support/no_threads.py
says.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys
from datetime import timedelta

import numpy as np

import hpcdist as dist


def check(fine: bool, what: object) -> None:
    if not fine:
        raise AssertionError(f"rank {rank}: {what}")


def works(size: int) -> None:
    for length in (1, 100_000):
        tensor = np.ones(length, np.float32)
        dist.all_reduce(tensor)
        check(bool((tensor == size).all()), tensor)


faulthandler.dump_traceback_later(50, exit=True)
dist.init_process_group(timeout=timedelta(seconds=20))
rank, size = dist.get_rank(), dist.get_world_size()
world = dist.group.WORLD
refuse = ctypes.c_int.in_dll(ctypes.CDLL(None), "refuse")
works(size)
if "killed" in sys.argv:
    if rank == size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    size -= 1
    try:
        dist.barrier()
        check(False, "nobody died")
    except dist.RankFailedError:
        pass
open_files = []
for _ in range(3):
    refuse.value = rank == 1
    try:
        world.reconfigure()
        check(False, "there is a new world")
    except dist.DistError as error:
        check("rank 1 cannot start its watchdog" in str(error), repr(error))
    refuse.value = 0
    try:
        dist.barrier()
        check(False, "the old world works")
    except dist.RankFailedError as error:
        check("reconfigure" in str(error), repr(error))
    open_files.append(len(os.listdir("/proc/self/fd")))
check(open_files[2] <= open_files[0], open_files)
world.reconfigure()
works(size)
dist.destroy_process_group()
os.write(1, b"went on\n")
