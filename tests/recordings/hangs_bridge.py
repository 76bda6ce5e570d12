"""As hangs.py, over the bridge: the program is written for stock torch.

mpirun -n 2 python hangs_bridge.py KIND...
"""

from __future__ import annotations

import sys
import time
from datetime import timedelta

import torch
import torch.distributed as stock
from injected import LONGER, SECONDS, by_name, run
from torch import Tensor

import hpcdist.torch


def late_all_reduce(rank: int, data: Tensor) -> None:
    if rank == 1:
        time.sleep(LONGER)  # hung: late_all_reduce
    else:
        stock.all_reduce(data)  # here: late_all_reduce


def late_barrier(rank: int, data: Tensor) -> None:
    if rank == 1:
        time.sleep(LONGER)  # hung: late_barrier
    else:
        stock.barrier()  # here: late_barrier


def late_gathered(rank: int, data: Tensor) -> None:
    out = data.repeat(2)
    if rank == 1:
        time.sleep(LONGER)  # hung: late_gathered
    else:
        stock.all_gather_into_tensor(out, data)  # here: late_gathered


def late_asynchronous(rank: int, data: Tensor) -> None:
    if rank == 1:
        time.sleep(LONGER)  # hung: late_asynchronous
    else:
        stock.all_reduce(data, async_op=True).wait()  # here: late_asynchronous


def late_object(rank: int, data: Tensor) -> None:
    if rank == 1:
        time.sleep(LONGER)  # hung: late_object
    else:
        stock.broadcast_object_list([1], 0)  # here: late_object


def late_backward(rank: int, data: Tensor) -> None:
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(6, 2))
    loss = model(data).sum()
    if rank == 1:
        time.sleep(LONGER)  # hung: late_backward
    else:
        loss.backward()  # here: late_backward


def no_send(rank: int, data: Tensor) -> None:
    if rank == 1:
        time.sleep(LONGER)  # hung: no_send
    else:
        stock.recv(data, 1, tag=3)  # here: no_send


def no_receive(rank: int, data: Tensor) -> None:
    if rank == 1:
        time.sleep(LONGER)  # hung: no_receive
    else:
        stock.send(torch.zeros(1 << 20), 1, tag=4)  # here: no_receive


def crossed(rank: int, data: Tensor) -> None:
    if rank == 1:
        stock.recv(data, 0, tag=9)  # hung: crossed
    else:
        stock.all_reduce(data)  # here: crossed


def other_operation(rank: int, data: Tensor) -> None:
    if rank == 1:
        stock.broadcast(data, 0)  # hung: other_operation
    else:
        stock.all_reduce(data)  # here: other_operation


def other_size(rank: int, data: Tensor) -> None:
    if rank == 1:
        stock.all_reduce(data[:2].clone())  # hung: other_size
    else:
        stock.all_reduce(data)  # here: other_size


def other_dtype(rank: int, data: Tensor) -> None:
    if rank == 1:
        stock.all_reduce(data.int())  # hung: other_dtype
    else:
        stock.all_reduce(data)  # here: other_dtype


def other_reduction(rank: int, data: Tensor) -> None:
    if rank == 1:
        stock.all_reduce(data, stock.ReduceOp.MAX)  # hung: other_reduction
    else:
        stock.all_reduce(data)  # here: other_reduction


def other_root(rank: int, data: Tensor) -> None:
    if rank == 1:
        stock.broadcast(data, 1)  # hung: other_root
    else:
        stock.broadcast(data, 0)  # here: other_root


KINDS = by_name(
    late_all_reduce, late_barrier, late_gathered, late_asynchronous, late_object, late_backward,
    no_send, no_receive, crossed, other_operation, other_size, other_dtype, other_reduction,
    other_root,
)  # fmt: skip


def catch_up(name: str, rank: int) -> None:
    """Make the call that the other rank has given up: then the group is in step again."""
    try:
        if name == "no_receive":
            stock.recv(torch.zeros(1 << 20), 0, tag=4)
        elif rank == 1 and name.startswith(("late", "crossed")):
            stock.barrier()
    except RuntimeError:
        return


def main() -> None:
    hpcdist.torch.init_process_group(timeout=timedelta(seconds=60))
    rank = stock.get_rank()
    stock.barrier()
    world = hpcdist.torch.group(stock.group.WORLD)
    world.carrier.timeout = SECONDS  # the start is not what is tried
    for name in sys.argv[1:]:
        hpcdist.monitored_barrier(world, timedelta(seconds=20))
        run(KINDS[name], rank, torch.ones(6), (RuntimeError, ValueError))
        if rank == 1:
            catch_up(name, rank)
        time.sleep(0.3)


if __name__ == "__main__":
    main()
