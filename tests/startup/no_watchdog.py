"""Rank 1 cannot start the thread of its watchdog: no rank starts, and all can start again.

Start it as tests/support/no_threads.py says.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os

import numpy as np

import hpcdist as dist


def start() -> str:
    try:
        dist.init_process_group()
    except dist.DistBackendError as error:
        return str(error)
    return ""


# Not exit=True: the rank that is first would end the job before the other has told.
faulthandler.dump_traceback_later(30)
assert not start()
rank, size = dist.get_rank(), dist.get_world_size()
dist.destroy_process_group()
refuse = ctypes.c_int.in_dll(ctypes.CDLL(None), "refuse")
open_files = []
for _ in range(3):
    refuse.value = rank == 1
    text = start()
    assert "rank 1 cannot start its watchdog" in text, text
    assert not dist.is_initialized()
    refuse.value = 0
    open_files.append(len(os.listdir("/proc/self/fd")))
assert open_files[2] <= open_files[0], open_files
assert not start()
ones = np.ones(1000)
dist.all_reduce(ones)
assert (ones == size).all()
dist.destroy_process_group()
os.write(1, b"started again\n")
