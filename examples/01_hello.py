"""Who is here? The smallest program with hpcdist.

    mpirun -n 4 --oversubscribe python examples/01_hello.py
    python examples/01_hello.py          # without a launcher: a world of one process

Every process runs this same file. MPI, or the launcher, tells each of them its rank.
"""

from __future__ import annotations

import argparse
import os
import socket

import torch
from say import say

import hpcdist as dist


def main() -> None:
    argparse.ArgumentParser(description="Who is here?").parse_args()

    # No address, no port, no environment variables: under mpirun and srun, MPI knows it all.
    dist.init_process_group()

    rank = dist.get_rank()
    size = dist.get_world_size()
    say(
        f"of {size}, on {socket.gethostname()} (local rank {dist.get_node_local_rank()}), "
        f"backend {dist.get_backend()}, {len(os.sched_getaffinity(0))} core(s) to run on"
    )

    # The first collective: every rank puts in its own number, every rank gets the sum.
    total = torch.tensor([float(rank)])
    dist.all_reduce(total)
    assert total.item() == size * (size - 1) / 2
    say(f"the sum of all ranks is {total.item():.0f}")

    # Frees what the group holds. MPI itself is shut down when the program ends.
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
