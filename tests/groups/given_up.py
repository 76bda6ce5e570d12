"""Rank 0 gives up an agreement and its group, and the others decide it later.

MPI then writes the decision, in memory that must not be anything else's by now.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import sys
import time
from datetime import timedelta

import hpcdist as dist
from hpcdist import _engine

PATTERN = 0xA5
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes = [ctypes.c_size_t]


def give_up(what: str) -> None:
    world = dist.group.WORLD
    try:
        if what == "session":
            world.reconfigure(timeout=timedelta(seconds=0.5))
        else:
            _engine.agree(world.carrier, 3, 0.5)
    except dist.DistTimeoutError:
        return
    raise AssertionError("no timeout")


def main(what: str) -> None:
    dist.init_process_group()
    rank = dist.get_rank()
    sizes = range(64, 2049, 16)
    taken = (ctypes.c_void_p * (4 * len(sizes)))()
    dist.barrier()
    if rank:
        time.sleep(1)
        try:
            if what == "session":
                dist.group.WORLD.reconfigure(timeout=timedelta(seconds=20))
            else:
                _engine.agree(dist.group.WORLD.carrier, 3, 20.0)
        except dist.DistError as error:
            print(error, flush=True)
        time.sleep(6)
        os._exit(0)
    give_up(what)
    dist.destroy_process_group()
    for i in range(len(taken)):  # what was freed is taken again
        size = sizes[i % len(sizes)]
        taken[i] = libc.malloc(size)
        ctypes.memset(taken[i], PATTERN, size)
    began = time.monotonic()
    while time.monotonic() < began + 1.5:
        try:  # lets MPI make progress
            dist.init_process_group(timeout=timedelta(seconds=0.5))
        except dist.DistError:
            pass
    for i in range(len(taken)):
        size = sizes[i % len(sizes)]
        if ctypes.string_at(taken[i], size) != bytes([PATTERN]) * size:
            print(f"MPI wrote to other memory of {size} bytes", flush=True)
            os._exit(1)
    print("kept", flush=True)
    os._exit(0)


faulthandler.dump_traceback_later(60, exit=True)
main(sys.argv[1])
