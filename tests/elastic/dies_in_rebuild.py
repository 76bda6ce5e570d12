"""A rank dies while the others make their groups again; see tests/support/lingering.py.

Rank 3 dies in a step. In the recovery rank 2 dies when it leaves the call chosen, and rank 1 stays
in it for a second.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
from datetime import timedelta

import numpy as np

import hpcdist as dist


def main() -> None:
    faulthandler.dump_traceback_later(100, exit=True)
    dist.init_process_group(timeout=timedelta(seconds=20))
    me = dist.get_rank()
    every = dist.new_group()
    half, _ = dist.new_subgroups(2)
    try:
        for step in range(10_000_000):
            if step == 3 and me == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            dist.all_reduce(np.ones(1), group=every)
    except dist.RankFailedError as error:
        assert error.ranks == (3,), error.ranks
    if me in (1, 2):
        name = "dies" if me == 2 else "linger"
        ctypes.c_int.in_dll(ctypes.CDLL(None), name).value = 1
    done = dist.group.WORLD.reconfigure(rebuild=True)
    for group in (every, half):
        total = np.ones(1)
        dist.all_reduce(total, group=group)
        assert dist.get_process_group_ranks(group) == [0, 1] and total == 2, (group, total)
    print(f"ended {done.ranks} {done.lost}", flush=True)
    dist.destroy_process_group()


main()
