"""The programs that test_gave_up.py starts under mpirun: ranks end because another one is late.

    mpirun -n N python gave_up.py NAME FOLDER

Rank 0 gives up first, the last rank never comes. Each of the others says what its call ended with.
They know how far the others are by files in the folder.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import numpy as np
from ending_parts import say

import hpcdist as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from patience import wait_for  # noqa: E402

#: Seconds: rank 0's timeout; that of the others, which never passes here.
FIRST, PATIENT = 1.5, 60.0


def call(group: dist.ProcessGroup | None = None) -> None:
    dist.all_reduce(np.ones(3, np.float32), group=group)


def tell(call, *args) -> None:
    """Say what a call ends with, after which the program ends in order."""
    try:
        call(*args)
    except dist.DistError as error:
        say(f"rank {dist.get_rank()}: {type(error).__name__}: {error}".replace("\n", " "))
    note_of(dist.get_rank()).write_text("said")


def note_of(rank: int) -> Path:
    return Path(sys.argv[2], f"{rank}")


def waits(rank: int, last: int) -> None:
    """Rank 0 fails while the others are in the same call."""
    if rank == 0:
        call()
    elif rank < last:
        tell(call)


def comes(rank: int, last: int) -> None:
    """Rank 0 has ended in order when the others come to that call."""
    if rank == 0:
        tell(call)
    elif rank < last:
        wait_for(note_of(0).exists, 20)
        time.sleep(FIRST)
        tell(call)


def receives(rank: int, last: int) -> None:
    """Rank 0 fails while the others wait for a message of its."""
    pair = dist.new_group([0, last], timeout=timedelta(seconds=FIRST))
    if rank == 0:
        call(pair)
    elif rank < last:
        tell(dist.recv, np.ones(3, np.float32), 0)
        time.sleep(4 * FIRST)  # rank 0 alone ends the job
    else:
        time.sleep(4 * FIRST)


def leaves(rank: int, last: int) -> None:
    """Rank 0 does not come to a call, and ends in order."""
    if rank > 0:
        tell(call)


def destroys(rank: int, last: int) -> None:
    """Rank 0 destroys a group in which another one waits, and the last rank does not come."""
    group = dist.new_group(timeout=timedelta(seconds=PATIENT))
    if rank == 0:
        dist.destroy_process_group(group)
    elif rank < last:
        tell(call, group)
    dist.barrier()


def main() -> None:
    dist.init_process_group(timeout=timedelta(seconds=PATIENT))
    dist.barrier()
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    if rank == 0 and sys.argv[1] in ("waits", "comes"):
        dist.group.WORLD.carrier.timeout = FIRST
    programs = {each.__name__: each for each in (waits, comes, receives, leaves, destroys)}
    programs[sys.argv[1]](rank, last)
    if rank == last:
        wait_for(lambda: all(note_of(other).exists() for other in range(1, last)), 20)
        os._exit(1)  # ends the job; how a job ends by itself is a matter of endings.py


if __name__ == "__main__":
    main()
