"""The program of test_dead_afar.py: rank 1 dies where no rank knows another's process id.

mpirun --with-ft ulfm -n 2 python dead_apart.py

As with a container for each rank and one /dev/shm for all: each begins a PID namespace of its own.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from datetime import timedelta

INSIDE = "HPCDIST_TEST_INSIDE"
if INSIDE not in os.environ:
    command = ["unshare", "--pid", "--fork", sys.executable, *sys.argv]
    os.execvpe(command[0], command, {**os.environ, INSIDE: "1"})

import torch  # noqa: E402
from ending_parts import say  # noqa: E402

import hpcdist as dist  # noqa: E402


def main() -> None:
    dist.init_process_group(timeout=timedelta(seconds=25))
    tensor = torch.ones(1 << 18)
    dist.all_reduce(tensor)
    if dist.get_rank() == 1:
        time.sleep(0.3)
        # No signal of its own kills the first process of a namespace.
        ctypes.string_at(0)
    try:
        dist.all_reduce(tensor)
    except dist.DistError as error:
        say(f"all_reduce: {type(error).__name__}: {error}")
    dist.group.WORLD.reconfigure()
    say(f"on with {dist.get_world_size()}")
    dist.destroy_process_group()


main()
