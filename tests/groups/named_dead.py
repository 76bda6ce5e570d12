"""A rank of another node dies while others receive from it: they name it, and go on."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta

import torch

import hpcdist as dist


def main() -> None:
    dist.init_process_group(timeout=timedelta(seconds=60))
    rank, victim = dist.get_rank(), dist.get_world_size() - 1
    dist.barrier()
    if rank == victim:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        dist.recv(torch.ones(5), victim)
    except dist.RankFailedError as error:
        print(f"named {error.ranks}", flush=True)
        dist.shrink_group(error.ranks)
    print(f"went on with {dist.get_world_size()}", flush=True)
    dist.destroy_process_group()


main()
