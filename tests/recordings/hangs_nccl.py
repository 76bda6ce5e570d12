"""As hangs.py, over the stand-in for NCCL: the groups' CUDA tensors go over it.

    mpirun -n 2 python hangs_nccl.py KIND...

Each kind has a group of its own, because an error over NCCL ends the group.
"""

from __future__ import annotations

import sys
import time
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import standin
import torch
from injected import LONGER, SECONDS, by_name, run
from standin import gpu
from torch import Tensor

import hpcdist as dist
from hpcdist.backends import cuda

OWN: list[dist.ProcessGroup] = []  #: the group of the kind that runs


def late_all_reduce(rank: int, data: Tensor) -> None:
    if rank == 1:
        time.sleep(LONGER)  # hung: late_all_reduce
    else:
        dist.all_reduce(data, group=OWN[0], async_op=True).wait(10.0)  # here: late_all_reduce


def late_broadcast(rank: int, data: Tensor) -> None:
    if rank == 1:
        time.sleep(LONGER)  # hung: late_broadcast
    else:
        dist.broadcast(data, 0, group=OWN[0], async_op=True).wait(10.0)  # here: late_broadcast


def late_gathered(rank: int, data: Tensor) -> None:
    out = gpu(torch.zeros(12))
    if rank == 1:
        time.sleep(LONGER)  # hung: late_gathered
    else:
        dist.all_gather_into_tensor(out, data, OWN[0], True).wait(10.0)  # here: late_gathered


def other_operation(rank: int, data: Tensor) -> None:
    if rank == 1:
        dist.broadcast(data, 0, group=OWN[0], async_op=True).wait(10.0)  # hung: other_operation
    else:
        dist.all_reduce(data, group=OWN[0], async_op=True).wait(10.0)  # here: other_operation


def other_size(rank: int, data: Tensor) -> None:
    if rank == 1:
        two = gpu(torch.ones(2))
        dist.all_reduce(two, group=OWN[0], async_op=True).wait(10.0)  # hung: other_size
    else:
        dist.all_reduce(data, group=OWN[0], async_op=True).wait(10.0)  # here: other_size


def other_dtype(rank: int, data: Tensor) -> None:
    if rank == 1:
        odd = gpu(torch.ones(6, dtype=torch.float64))
        dist.all_reduce(odd, group=OWN[0], async_op=True).wait(10.0)  # hung: other_dtype
    else:
        dist.all_reduce(data, group=OWN[0], async_op=True).wait(10.0)  # here: other_dtype


def other_reduction(rank: int, data: Tensor) -> None:
    if rank == 1:
        dist.all_reduce(data, dist.ReduceOp.MAX, OWN[0], True).wait(10.0)  # hung: other_reduction
    else:
        dist.all_reduce(data, group=OWN[0], async_op=True).wait(10.0)  # here: other_reduction


def other_root(rank: int, data: Tensor) -> None:
    if rank == 1:
        dist.broadcast(data, 1, group=OWN[0], async_op=True).wait(10.0)  # hung: other_root
    else:
        dist.broadcast(data, 0, group=OWN[0], async_op=True).wait(10.0)  # here: other_root


KINDS = by_name(
    late_all_reduce, late_broadcast, late_gathered, other_operation, other_size, other_dtype,
    other_reduction, other_root,
)  # fmt: skip


def main() -> None:
    standin.load()
    cuda.use(standin.Runtime())
    dist.init_process_group("cpu:mpi,cuda:nccl", timeout=timedelta(seconds=20))
    rank = dist.get_rank()
    for name in sys.argv[1:]:
        OWN[:] = [dist.new_group(timeout=timedelta(seconds=20))]
        dist.all_reduce(gpu(torch.ones(1)), group=OWN[0])
        standin.Stream(0).synchronize()
        dist.monitored_barrier()
        # from here on: making the communicator is not what is tried
        OWN[0].carrier.timeout = SECONDS
        run(KINDS[name], rank, gpu(torch.ones(6)), (dist.DistError, ValueError))
        time.sleep(0.3)


if __name__ == "__main__":
    main()
