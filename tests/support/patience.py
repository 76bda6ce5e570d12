"""Limits that a busy machine cannot break: how much longer than usual something may take."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import hpcdist

#: Beyond this a limit would no longer end what hangs.
MOST = 6.0
#: Seconds of a core that `_work` takes on the machine for which the limits were chosen.
USUAL = 0.012
#: Seconds for which a machine may keep one process from running at all.
STALL = 2.5


def patience() -> float:
    """Return by how much limits of time are stretched now.

    1 where every process has a core as fast as usual; else how many share one, times how much
    slower it is, at most ``MOST``. The ranks of a job count as well, but a job that hangs only ends
    later for that.
    """
    minute, _, _, running, _ = Path("/proc/loadavg").read_text().split()
    # What has begun within this minute counts in part only among what ran in it.
    busy = max(float(minute), float(running.partition("/")[0]))
    return min(max(1.0, busy / len(os.sched_getaffinity(0))) * slowness(), MOST)


def at_most(seconds: float) -> float:
    """Return the limit of what takes at most so many seconds on a quiet machine.

    Where a group's or a store's timeout is long, it still tells what ends early from what waits.
    """
    return seconds * patience() + STALL


@cache
def slowness() -> float:
    """Return how much slower than usual a core is, at least 1, whatever else runs on it."""
    return max(1.0, min(_work() for _ in range(3)) / USUAL)


def _work() -> float:
    began, total = time.thread_time(), 0
    for i in range(100_000):
        total += i * i % 7
    return time.thread_time() - began


def wait_for(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Wait for a condition, and fail if it has not come after so many seconds."""
    seconds *= patience()
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, f"not so after {seconds:.3g} s"
        time.sleep(0.05)


def hasty_group(seconds: float) -> hpcdist.ProcessGroup:
    """Make a group whose operations give up after so many seconds.

    Its members may take longer to make it: they come from different work, on cores that they share.
    """
    import hpcdist

    group = hpcdist.new_group()
    group.timeout = timedelta(seconds=seconds)
    return group
