"""Printing that stays readable with many ranks; shared by the examples."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import hpcdist as dist


def say(text: object) -> None:
    """Print one line (or more) per rank, in the order of the ranks. All ranks must call it.

    Processes that print for themselves mix their lines at random, so rank 0 collects the texts
    and prints them all.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    texts = [None] * size if rank == 0 else None
    dist.gather_object(str(text), texts, dst=0)
    if texts is not None:
        for sender, lines in enumerate(texts):
            for line in lines.splitlines():
                print(f"[rank {sender}] {line}", flush=True)


def title(text: str) -> None:
    """Print a heading, once."""
    if dist.get_rank() == 0:
        print(f"\n{text}", flush=True)


def on_terminal() -> bool:
    """Return whether what this process prints appears on a terminal.

    The process's own output does not show it: Open MPI gives every rank a pseudoterminal, MPICH a
    pipe, and mpirun forwards what arrives there. So mpirun's output counts, if it runs on this
    host; srun's ranks are not its children, and are taken for a batch job's.
    """
    process, launched = os.getppid(), dist.get_world_size() > 1
    while process > 1:
        try:
            stat = Path(f"/proc/{process}/stat").read_text()
            name = stat[stat.index("(") + 1 : stat.rindex(")")]
            if name in ("prterun", "orterun") or name.startswith(("mpirun", "mpiexec")):
                return os.readlink(f"/proc/{process}/fd/1").startswith(("/dev/pts/", "/dev/tty"))
            process = int(stat[stat.rindex(")") + 1 :].split()[1])
        except OSError:
            break
    return not launched and sys.stdout.isatty()
