"""The program that test_unsent.py starts under mpirun: calls are given up while a rank is stopped.

    mpirun -n 2 python unsent.py CALLS BYTES

Rank 1 stops itself. Rank 0 gives up so many calls of that size, lets rank 1 go on, and computes.
Then rank 1 makes the same calls. Each says how long its own took.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import numpy as np
from ending_parts import say

import hpcdist as dist

#: Seconds: rank 0's timeout, that of rank 1, and for how long rank 0 computes.
SHORT, PATIENT, BUSY = 0.02, 4.0, 8.0


def calls(group: dist.ProcessGroup, many: int, values: np.ndarray) -> float:
    """Make so many calls, of which each fails; return how many seconds they took."""
    began = time.monotonic()
    for _ in range(many):
        try:
            dist.all_reduce(values, group=group)
        except dist.DistTimeoutError:
            continue
        say("a call did not fail")
    return time.monotonic() - began


def is_stopped(pid: int) -> None:
    """Wait until a process has been stopped."""
    until = time.monotonic() + 30
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        assert time.monotonic() < until, "not stopped"
        time.sleep(0.01)


def main() -> None:
    many, values = int(sys.argv[1]), np.ones(int(sys.argv[2]) // 8)
    dist.init_process_group(timeout=timedelta(seconds=60))
    rank = dist.get_rank()
    group = dist.new_group()
    pids: list[int] = [0, 0]
    dist.all_gather_object(pids, os.getpid())
    dist.all_reduce(values, group=group)
    dist.barrier()
    group.carrier.timeout = SHORT if rank == 0 else PATIENT
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
        say(f"late {calls(group, many, values)}")
    else:
        is_stopped(pids[1])
        say(f"gave up {calls(group, many, values)}")
        os.kill(pids[1], signal.SIGCONT)
        until = time.monotonic() + BUSY
        while time.monotonic() < until:
            sum(range(1000))
    dist.barrier()
    group.carrier.timeout = 20
    values[:] = 1
    dist.all_reduce(values, group=group)
    say(f"sum {values[0]}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
