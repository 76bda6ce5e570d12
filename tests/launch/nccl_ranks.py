"""A rank of a job over NCCL without MPI: python nccl_ranks.py CASE, with torchrun's variables."""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import standin
import torch
from standin import cpu, gpu

import hpcdist as dist
from hpcdist import _engine
from hpcdist.backends.nccl import device


def main(case: str) -> None:
    standin.load()
    device.use(standin.Runtime())
    limit = 1.0 if case in ("die", "absent") else 20.0
    dist.init_process_group("nccl", "env://", timeout=timedelta(seconds=20))
    rank, size = dist.get_rank(), dist.get_world_size()
    assert _engine.mpi_state() == "none", "NCCL over a store needs no MPI"
    data = gpu(torch.full((5,), rank + 1.0))
    dist.all_reduce(data)
    assert bool((cpu(data) == size * (size + 1) / 2).all()), cpu(data)
    found = [None] * size
    dist.all_gather_object(found, rank)
    assert found == list(range(size))
    if size > 1:
        pair = gpu(torch.zeros(1))
        if rank == 0:
            dist.send(gpu(torch.ones(1)), 1)
        elif rank == 1:
            dist.recv(pair, 0)
            assert cpu(pair).item() == 1
    half = dist.new_group(list(range(rank % 2, size, 2)), use_local_synchronization=True)
    dist.all_reduce(data.fill_(1), group=half)
    assert bool((cpu(data) == half.size()).all())
    dist.barrier()
    if case in ("die", "absent"):
        short = dist.new_group(list(range(size)), timeout=timedelta(seconds=limit))
        dist.all_reduce(data, group=short)
        cpu(data)
        dist.barrier()
        if case == "die":
            os.environ["NCCL_STANDIN_FAULT"] = f"die:{size - 1}:2"
        began = time.monotonic()
        if case == "absent" and rank == size - 1:
            time.sleep(limit + 2)
            os._exit(0)
        try:
            dist.all_reduce(data, group=short, async_op=True).wait(30.0)
        except dist.DistError as error:
            took = time.monotonic() - began
            print(f"\nrank {rank}: {type(error).__name__} after {took:.2f} s: {error}", flush=True)
            os._exit(7)
        raise AssertionError("the operation came back without an error")
    dist.destroy_process_group()
    print(f"\nrank {rank} of {size}: fine", flush=True)


main(sys.argv[1])
