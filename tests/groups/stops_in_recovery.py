"""Rank 3 dies; rank 1 calls reconfigure last, and is stopped while the others make a new group.

It may stop a little too late: then their next call finds out.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
import time
from datetime import timedelta

import numpy as np

import hpcdist as dist


def stop() -> None:
    time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGSTOP)


faulthandler.dump_traceback_later(60, exit=True)
dist.init_process_group(timeout=timedelta(seconds=50))
rank = dist.get_rank()
dist.barrier()
dist.group.WORLD.timeout = timedelta(seconds=5)
print(f"began {time.time()}", flush=True)
if rank == 3:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    while True:
        dist.all_reduce(np.ones(10))
except dist.RankFailedError:
    pass
if rank == 1:
    time.sleep(1)
    threading.Thread(target=stop, daemon=True).start()
for _ in range(2):
    dist.group.WORLD.reconfigure(timeout=timedelta(seconds=3))
    try:
        dist.barrier()
        break
    except dist.RankFailedError as error:
        print(f"afterwards: {error.ranks}", flush=True)
print(f"{dist.get_world_size()} go on", flush=True)
dist.destroy_process_group()
