"""Jobs that run while a test looks at their flight recorders."""

from __future__ import annotations

import subprocess
import sys

from jobs import mpirun_command
from patience import wait_for

from hpcdist.recordings import rows_of

__all__ = ["SLEEPER", "pids_of", "start", "wait_till_hung"]


def start(program: str, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    command, full = mpirun_command(2, env)
    return subprocess.Popen(
        [*command, sys.executable, "-c", program], env=full, text=True, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


SLEEPER = """
import os, sys, time, numpy as np, hpcdist as d
d.init_process_group()
d.all_reduce(np.ones(3))
os.write(1, b"pid %d %d\\n" % (d.get_rank(), os.getpid()))  # at once: the ranks share a pipe
if d.get_rank() == 1:
    time.sleep({seconds})  # the rank that is late
d.barrier()
"""


def pids_of(job: subprocess.Popen[str]) -> dict[int, int]:
    """Read what the ranks print at first."""
    assert job.stdout is not None
    found: dict[int, int] = {}
    while len(found) < 2:
        line = job.stdout.readline()
        assert line, "the job ended"
        if line.startswith("pid "):
            _, rank, pid = line.split()
            found[int(rank)] = int(pid)
    return found


def wait_till_hung(pids: dict[int, int]) -> None:
    """Wait until rank 0 of `SLEEPER` is in its barrier, and rank 1 in none."""
    wait_for(lambda: [row["inside"] for row in rows_of(str(pids[0]), False)] == [True, False])
