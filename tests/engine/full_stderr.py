"""Standard error of rank 0 is a full pipe that nobody reads: its watchdog must not wait for that.

`late`: it has a rank to warn of. `recorder`: the flight recorder cannot be copied.
"""

from __future__ import annotations

import faulthandler
import fcntl
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import hpcdist as dist


def fill_stderr() -> None:
    reader, writer = os.pipe()
    os.set_inheritable(reader, True)
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    os.set_blocking(writer, False)
    try:
        while True:
            os.write(writer, b"x")
    except BlockingIOError:
        pass
    os.set_blocking(writer, True)
    os.dup2(writer, 2)


def ticks() -> int:
    """Return how often the watchdog has slept."""
    for task in Path("/proc/self/task").iterdir():
        if (task / "comm").read_text().strip() == "hpcdist-watch":
            status = (task / "status").read_text()
            return int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0])
    raise AssertionError("no watchdog")


what = sys.argv[1]
faulthandler.dump_traceback_later(40, exit=True)
dist.init_process_group(timeout=timedelta(seconds=30))
rank = dist.get_rank()
if rank == 0:
    fill_stderr()
dist.barrier()
dist.group.WORLD.timeout = timedelta(seconds=2)
if rank == 0:
    began, text = time.monotonic(), ""
    try:
        dist.barrier()
    except dist.DistTimeoutError as error:
        text = str(error)
    spent = time.monotonic() - began
    if what == "recorder":
        time.sleep(1.5)
    before = ticks()
    time.sleep(1)
    slept = ticks() - before
    os.write(1, f"timeout {'timeout after' in text}, {spent:.2f} s, {slept} ticks\n".encode())
else:
    time.sleep(4.5)
    try:
        dist.barrier()
    except dist.DistTimeoutError:
        pass
dist.destroy_process_group()
