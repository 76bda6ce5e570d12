"""The program of test_dead_afar.py: rank 1, on another node, dies, and rank 0 needs it.

mpirun --with-ft ulfm -n 2 python dead_afar.py
"""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta

import torch
from ending_parts import say

import hpcdist as dist


def main() -> None:
    dist.init_process_group(timeout=timedelta(seconds=30))
    memory, out = torch.ones(1 << 16), torch.ones(1 << 16)
    window, _ = dist.group.WORLD.new_window(memory), dist.barrier()
    if dist.get_rank() == 1:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    calls = {
        "get": lambda: window.get(out, 1),
        "put": lambda: window.put(out, 1),
        "recv": lambda: dist.recv(out, 1),
        "send": lambda: dist.send(out, 1),
        "all_reduce": lambda: dist.all_reduce(out),
    }
    for name, call in calls.items():
        try:
            while name in ("get", "put"):  # until it has died
                call()
            call()
        except dist.DistError as error:
            say(f"{name}: {type(error).__name__}: {error}")
    os._exit(0)  # which ends the job


main()
