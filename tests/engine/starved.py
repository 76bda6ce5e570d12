"""The program of test_starved.py: rank 0 gets no core while data moves.

    mpirun -n 2 python starved.py

A thread of the lowest priority that shares one core with a process that computes gets a few
thousandths of it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta

import numpy as np

import hpcdist as dist

#: Ends with who started it, however that ends.
COMPUTES = f"import ctypes; ctypes.CDLL(None).prctl(1, {int(signal.SIGKILL)})\nwhile True: pass"


def starve(thread: int, core: int) -> None:
    time.sleep(0.3)
    os.sched_setaffinity(thread, {core})
    os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))


def main() -> None:
    dist.init_process_group(timeout=timedelta(seconds=60))
    group, values = dist.new_group(), np.ones(1 << 25, np.float32)
    dist.all_reduce(values, group=group)
    group.timeout = timedelta(seconds=1.5)
    if dist.get_rank() == 0:
        core = min(os.sched_getaffinity(0))
        other = subprocess.Popen([sys.executable, "-c", COMPUTES])
        os.sched_setaffinity(other.pid, {core})
        starving = (threading.get_native_id(), core)
        threading.Thread(target=starve, args=starving, daemon=True).start()
    while True:
        dist.all_reduce(values, group=group)


main()
