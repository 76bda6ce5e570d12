"""The program that test_suspended.py starts under mpirun: the job is stopped, and goes on later.

    mpirun -n 2 python suspended.py

Rank 0 waits for rank 1 in every way at once: in a collective, for asynchronous ones, one of them
queued behind another, and for a message. Rank 1 computes. Both are stopped for longer than the
timeout.
"""

from __future__ import annotations

import os
import subprocess
import time
from datetime import timedelta

import torch
from ending_parts import say

import hpcdist as dist

#: Seconds: the timeout of all calls; for how long the job is stopped; of a core that rank 1 needs.
TIMEOUT, STOPPED, COMPUTES = 4.0, 5.5, 0.5


def stop(pids: list[int]) -> None:
    """Let another process stop these, and let them go on."""
    names = " ".join(map(str, pids))
    subprocess.Popen(
        ["sh", "-c", f"sleep 0.3; kill -STOP {names}; sleep {STOPPED}; kill -CONT {names}"]
    )


def main() -> None:
    dist.init_process_group(timeout=timedelta(seconds=TIMEOUT))
    rank, queued = dist.get_rank(), dist.new_group()
    pids = [0, 0]
    dist.all_gather_object(pids, os.getpid())
    sums = [torch.full((n,), float(rank + 1)) for n in (3, 1 << 20, 3)]
    dist.all_reduce(torch.ones(1 << 20), group=queued)
    message = torch.zeros(5)
    dist.barrier()
    if rank == 1:
        stop(pids)
        end = time.process_time() + COMPUTES
        while time.process_time() < end:
            pass
    works = [dist.all_reduce(each, group=queued, async_op=True) for each in sums[1:]]
    works.append(dist.irecv(message, 1) if rank == 0 else dist.isend(message + 7, 0))
    dist.all_reduce(sums[0])
    for work in works:
        work.wait()
    wanted = 7.0 * (rank == 0)
    right = all(each.eq(3).all() for each in sums) and bool(message.eq(wanted).all())
    say(f"rank {rank}: {'right' if right else (sums, message)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
