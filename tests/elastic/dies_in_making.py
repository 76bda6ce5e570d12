"""A rank dies while the others make their new world; see tests/support/lingering.py.

Rank 3 dies in a step. In the recovery rank 2 dies when it leaves the call chosen, and rank 1 stays
in it for a second.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
from datetime import timedelta

import torch

import hpcdist as dist
from hpcdist.elastic import State, elastic, joining

FATAL, STEPS = 2, 4


def main() -> None:
    faulthandler.dump_traceback_later(100, exit=True)
    dist.init_process_group(timeout=timedelta(seconds=20))
    former, spare = dist.get_rank(), joining()
    total = torch.zeros(1)
    state = State(total=total, copies=2)
    for step in elastic(state, STEPS):
        with step:
            if step.index == FATAL and not spare and not state.lost:
                if former == 3:
                    os.kill(os.getpid(), signal.SIGKILL)
                if former in (1, 2):
                    name = "dies" if former == 2 else "linger"
                    ctypes.c_int.in_dll(ctypes.CDLL(None), name).value = 1
            one = torch.ones(1)
            dist.all_reduce(one)
            total += one
    print(f"ended {dist.get_world_size()} {sorted(sum(state.lost, ()))}", flush=True)
    dist.destroy_process_group()


main()
