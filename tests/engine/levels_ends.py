"""The program of test_levels_endings.py: rank 1 ends, or stops, where the others move data.

mpirun -n 3 python levels_ends.py OPERATION killed|stopped
"""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta

import numpy as np
from ending_parts import say

import hpcdist as dist

#: Seconds that an operation may take.
LIMIT = 2.0


def main() -> None:
    operation, how = sys.argv[1:]
    dist.init_process_group(timeout=timedelta(seconds=20))
    rank, size = dist.get_rank(), dist.get_world_size()
    whole, part = np.zeros(100_000 * size, np.float32), np.zeros(100_000, np.float32)
    call = {
        "all_reduce": lambda: dist.all_reduce(whole),
        "reduce": lambda: dist.reduce(whole, 2),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(part, whole),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(whole, part),
        "broadcast": lambda: dist.broadcast(whole, 1),
    }[operation]
    call()
    native = dist.group.WORLD.carrier
    assert native.node_memory > 0
    native.check, native.timeout = 0, LIMIT  # the entry check would wait for rank 1
    dist.barrier()
    if rank == 1:
        time.sleep(0.2)
        say(f"began {time.time():.3f}")
        os.kill(os.getpid(), signal.SIGKILL if how == "killed" else signal.SIGSTOP)
    call()
    dist.barrier()
    say(f"rank {rank} went on")


main()
