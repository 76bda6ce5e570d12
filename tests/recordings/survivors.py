"""Two ranks with two spares, of which rank 1 dies: what ``top`` shows then, from rank 0."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import torch

import hpcdist as dist
from hpcdist.elastic import State, elastic, joining


def main() -> None:
    dist.init_process_group()
    spare = joining()
    if dist.get_rank() == 0:
        show("before")
    model = torch.nn.Linear(2, 2)
    for step in elastic(State(model=dist.DistributedDataParallel(model)), 3):
        with step:
            if step.index == 1 and dist.get_rank() == 1 and not spare:
                os.kill(os.getpid(), signal.SIGKILL)
            dist.barrier()
    if dist.get_rank() == 0:
        show("after")
    dist.barrier()
    dist.destroy_process_group()


def show(when: str) -> None:
    """Print the lines of top, each after a word."""
    command = [sys.executable, "-m", "hpcdist", "top", "--once", str(os.getpid())]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    for line in (shown.stdout + shown.stderr).splitlines():
        print(f"{when}: {line}", flush=True)


if __name__ == "__main__":
    main()
