"""Limits that a busy machine cannot break: how much longer than usual something may take."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import hpcdist

#: Beyond this a limit would no longer end what hangs.
MOST = 4.0


def patience() -> float:
    """Return by how much limits of time are stretched now.

    1 where every process has a core; else how many share one, at most ``MOST``. The ranks of a job
    count as well, but a job that hangs only ends later for that.
    """
    sharing = os.getloadavg()[0] / len(os.sched_getaffinity(0))
    return min(max(1.0, sharing), MOST)


def wait_for(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Wait for a condition, and fail if it has not come after so many seconds."""
    until = time.monotonic() + seconds * patience()
    while not condition():
        assert time.monotonic() < until, f"not so after {seconds:g} s"
        time.sleep(0.05)


def hasty_group(seconds: float) -> hpcdist.ProcessGroup:
    """Make a group whose operations give up after so many seconds.

    Its members may take longer to make it: they come from different work, on cores that they share.
    """
    import hpcdist

    group = hpcdist.new_group()
    group.timeout = timedelta(seconds=seconds)
    return group
