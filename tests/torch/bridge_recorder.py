"""What test_bridge.py starts to see the flight recorder: some operations, then a mismatch."""

from __future__ import annotations

import sys

import torch
import torch.distributed as td

import hpcdist
import hpcdist.torch


def main() -> None:
    hpcdist.torch.init_process_group()
    rank, size = td.get_rank(), td.get_world_size()
    for _ in range(3):
        td.all_reduce(torch.ones(5))
    works = [td.all_reduce(torch.ones(2, 3), async_op=True) for _ in range(2)]
    td.all_gather_into_tensor(torch.empty(2 * size), torch.ones(2))
    td.reduce_scatter_tensor(torch.empty(2), torch.ones(2 * size))
    td.broadcast(torch.ones(4, dtype=torch.int64), 0)
    td.all_gather([torch.empty(3) for _ in range(size)], torch.ones(3))
    td.all_to_all_single(torch.empty(size), torch.ones(size))
    td.barrier()
    if rank == 0:
        td.send(torch.ones(7), 1)
    elif rank == 1:
        td.recv(torch.ones(7), 0)
    pair = td.new_group([0, 1], group_desc="the pair")
    if rank < 2:
        td.all_reduce(torch.ones(1), group=pair)
    for work in works:
        work.wait()
    td.barrier()
    hpcdist.torch.dump_flight_recorder(sys.argv[1])
    try:
        if rank == size - 1:
            td.broadcast(torch.ones(2), 0)
        else:
            td.all_reduce(torch.ones(2))
    except hpcdist.DistMismatchError:
        print("mismatch", flush=True)
    for wrong in (
        lambda: td.all_gather([], torch.ones(2)),
        lambda: td.reduce_scatter(torch.ones(2), []),
    ):
        try:
            wrong()
        except ValueError as error:
            assert "has 0 tensors" in str(error), error
    td.destroy_process_group()


if __name__ == "__main__":
    main()
