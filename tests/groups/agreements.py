"""Agrees on random flags over and over, while another thread of each process is in MPI.

agreements.py ROUNDS
"""

from __future__ import annotations

import random
import sys
import threading

import numpy as np

import hpcdist as dist
from hpcdist.groups.reconfigure import agree


def main() -> None:
    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    over, draw, wrong = threading.Event(), random.Random(3), []

    def look() -> None:
        """Make MPI's progress, as a thread does that waits for a message."""
        work = dist.irecv(np.zeros(1), (rank - 1) % size, tag=9)
        while not over.is_set():
            work.is_completed()
        work.wait()

    thread = threading.Thread(target=look)
    thread.start()
    for _ in range(int(sys.argv[1])):
        given = [draw.randrange(-(1 << 31), 1 << 31) | draw.randrange(1 << 31) for _ in range(size)]
        want = -1
        for each in given:
            want &= each
        if (got := agree(given[rank])) != want:
            wrong.append(f"{got:#x} instead of {want:#x}")
    over.set()
    dist.send(np.zeros(1), (rank + 1) % size, tag=9)
    thread.join()
    print(f"rank {rank}: {len(wrong)} wrong, {wrong[:3]}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
