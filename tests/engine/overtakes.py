"""The program that test_overtakes.py starts: a short message of another type overtakes a long one.

    mpirun -n 2 python overtakes.py

The sender's MPI has one thread at a time, and that thread sleeps: the long message goes on when it
wakes. The short one has arrived by then.
"""

from __future__ import annotations

import time

import mpi4py

mpi4py.rc.thread_level = "serialized"

import torch  # noqa: E402
from ending_parts import say  # noqa: E402
from mpi4py import MPI  # noqa: E402, F401  (starts MPI)

import hpcdist as dist  # noqa: E402

SLEEPS = 1.5


def main() -> None:
    dist.init_process_group()
    rank = dist.get_rank()
    long, short = torch.full((5_000_000,), float(not rank)), torch.tensor([7 * (not rank)])
    dist.barrier()
    if rank == 0:
        works = [dist.isend(long, 1), dist.isend(short, 1)]
        time.sleep(SLEEPS)
        for work in works:
            work.wait()
    else:
        dist.recv(long, 0)
        dist.recv(short, 0)
        say(f"received {long.min():g} to {long.max():g}, and {short.item()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
