"""A rank that is stopped while the other one has its error and leaves: test_reports.py starts it.

    mpirun -n 2 python leaves_nccl.py STOPPED

The ranks' broadcasts over the stand-in for NCCL have different roots. STOPPED is the rank that
stops itself after its call; the other one wakes it up when its own program is over.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import standin
import torch
from injected import SECONDS, run
from jobs import mapped_shm
from standin import gpu
from torch import Tensor

import hpcdist as dist
from hpcdist.backends import cuda

STOPPED = int(sys.argv[1])


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def other_root(rank: int, data: Tensor) -> None:
    group = dist.new_group(timeout=timedelta(seconds=20))
    dist.all_reduce(gpu(torch.ones(1)), group=group)
    standin.Stream(0).synchronize()
    pids: list[int] = [0, 0]
    dist.all_gather_object(pids, os.getpid())
    group.carrier.timeout = SECONDS
    if rank == STOPPED:
        work = dist.broadcast(data, rank, group=group, async_op=True)  # called by: stopped
        os.kill(os.getpid(), signal.SIGSTOP)
        work.wait(10.0)
        return
    while not is_stopped(pids[STOPPED]):
        time.sleep(0.01)
    try:
        dist.broadcast(data, rank, group=group, async_op=True).wait(10.0)  # called by: leaving
    finally:  # after the time that the end of this process takes
        subprocess.Popen(["/bin/sh", "-c", f"sleep 1; kill -CONT {pids[STOPPED]}"])


standin.load()
cuda.use(standin.Runtime())
dist.init_process_group("cpu:mpi,cuda:nccl", timeout=timedelta(seconds=20))
print("".join(f"shm {name}\n" for name in mapped_shm()), end="", flush=True)
run(other_root, dist.get_rank(), gpu(torch.ones(6)), (dist.DistError,))
