"""Some ranks among themselves: groups, subgroups and a device mesh.

    mpirun -n 4 --oversubscribe python examples/05_groups_and_mesh.py

Operations take a group; without one they run on all ranks. Groups do not disturb each other: their
operations may run at the same time.
"""

from __future__ import annotations

import torch
from say import say, title
from where import options, start

import hpcdist as dist


def even_and_odd(rank: int, size: int) -> None:
    """Two groups. new_group is called on all ranks, also for groups they are not in."""
    title("even and odd ranks")
    even = dist.new_group(range(0, size, 2), group_desc="even")
    odd = dist.new_group(range(1, size, 2), group_desc="odd") if size > 1 else None
    mine, name = (even, "even") if rank % 2 == 0 else (odd, "odd")

    total = torch.tensor([rank])
    dist.all_reduce(total, group=mine)
    say(
        f"{name} ranks {dist.get_process_group_ranks(mine)}: rank {rank} of the world is rank "
        f"{dist.get_group_rank(mine, rank)} there; their sum is {total.item()}"
    )
    # For the group's other ranks, src is still the rank in the world; group_src is the one inside.
    leader = torch.tensor([rank])
    dist.broadcast(leader, group_src=0, group=mine)
    assert leader.item() == dist.get_global_rank(mine, 0)
    dist.destroy_process_group(mine)


def pairs(rank: int, size: int) -> None:
    """Cut the world into groups of equal size, for example one per node."""
    if size % 2:
        return
    title("pairs")
    mine, groups = dist.new_subgroups(group_size=2)
    value = torch.tensor([float(rank)])
    dist.all_reduce(value, dist.ReduceOp.AVG, group=mine)
    say(f"{len(groups)} pairs; the average in mine is {value.item()}")
    dist.destroy_process_group(mine)


def mesh(rank: int, size: int, device: str) -> None:
    """Ranks as a grid: data parallelism along one axis, model parallelism along the other."""
    columns = 2 if size % 2 == 0 else 1
    shape = (size // columns, columns)
    title(f"a mesh of {shape[0]} x {shape[1]}")
    grid = dist.init_device_mesh(device, shape, mesh_dim_names=("data", "model"))

    row, column = torch.tensor([rank]), torch.tensor([rank])
    dist.all_reduce(row, group=grid["model"].get_group())  # along my row
    dist.all_reduce(column, group=grid.get_group("data"))  # along my column
    say(
        f"at {tuple(grid.get_coordinate())}: local rank {grid.get_local_rank('data')} in its "
        f"column, {grid.get_local_rank('model')} in its row; row sum {row.item()}, column sum "
        f"{column.item()}"
    )


def main() -> None:
    device = start(options(__doc__))  # init_process_group, and where new tensors go
    rank, size = dist.get_rank(), dist.get_world_size()
    even_and_odd(rank, size)
    pairs(rank, size)
    mesh(rank, size, device.type)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
