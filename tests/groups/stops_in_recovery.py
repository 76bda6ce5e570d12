"""Rank 3 dies; rank 1 calls reconfigure last, and is stopped while the others make a new group."""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
import time
from datetime import timedelta

import torch

import hpcdist as dist


def stop() -> None:
    time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGSTOP)


faulthandler.dump_traceback_later(60, exit=True)
dist.init_process_group(timeout=timedelta(seconds=5))
rank = dist.get_rank()
dist.barrier()
print(f"began {time.time()}", flush=True)
if rank == 3:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    while True:
        dist.all_reduce(torch.ones(10))
except dist.RankFailedError:
    pass
if rank == 1:
    time.sleep(1)
    threading.Thread(target=stop, daemon=True).start()
dist.group.WORLD.reconfigure(timeout=timedelta(seconds=3))
dist.barrier()
dist.destroy_process_group()
