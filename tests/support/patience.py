"""Limits that a busy machine cannot break: how much longer than usual a job may take."""

from __future__ import annotations

import os

#: Beyond this a limit would no longer end what hangs.
MOST = 4.0


def patience() -> float:
    """Return by how much limits of time are stretched now.

    1 where every process has a core; else how many share one, at most ``MOST``. The ranks of a job
    count as well, but a job that hangs only ends later for that.
    """
    sharing = os.getloadavg()[0] / len(os.sched_getaffinity(0))
    return min(max(1.0, sharing), MOST)
