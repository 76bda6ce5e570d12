"""Cases for tests/torch/bridge_same.py: groups whose ranks are in another order than the world's.

Each gives what its ranks ended with; the runner compares it with what gloo gave.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.distributed as td
import torch.distributed._functional_collectives as functional
from bridge_calls import own, poisoned
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

CASES: dict[str, Any] = {}

#: torch 2.13 is the first whose new_group keeps the order; before, these groups are sorted.
KEEPS = {"sort_ranks": False} if "sort_ranks" in inspect.signature(td.new_group).parameters else {}


def case(function):
    CASES[function.__name__.replace("_", " ")] = function
    return function


def turned() -> Any:
    """All ranks of the world, from the last to the first."""
    return td.new_group(list(reversed(range(td.get_world_size()))), **KEEPS)


def placed(group: Any) -> list:
    """Where a rank is in a group, to torch and to the group itself."""
    return [td.get_process_group_ranks(group), td.get_rank(group), group.rank(), group.size()]


def operations(group: Any) -> dict:
    """Every operation whose result or arguments depend on the members' order."""
    size, first = td.get_world_size(group), td.get_global_rank(group, 0)
    found: dict[str, Any] = {"placed": placed(group)}
    found["gathered"] = parts = [poisoned(2) for _ in range(size)]
    td.all_gather(parts, own(2), group=group)
    found["in one"] = together = poisoned(2 * size)
    td.all_gather_into_tensor(together, own(2), group=group)
    found["from the first"] = t = own(3)
    td.broadcast(t, first, group=group)
    found["from a group's rank"] = t = own(3)
    td.broadcast(t, group=group, group_src=size - 1)
    found["piece"] = piece = poisoned(2)
    td.reduce_scatter(piece, list(own(size, 2).unbind(0)), group=group)
    found["piece of one"] = piece = poisoned(2)
    td.reduce_scatter_tensor(piece, own(2 * size), group=group)
    found["to all"] = parts = [poisoned(2) for _ in range(size)]
    td.all_to_all(parts, list(own(size, 2).unbind(0)), group=group)
    found["to all in one"] = together = poisoned(size)
    td.all_to_all_single(together, own(size), group=group)
    here = td.get_rank() == first
    found["kept"] = kept = [poisoned(2) for _ in range(size)] if here else None
    td.gather(own(2), kept, first, group=group)
    found["dealt"] = mine = poisoned(2)
    td.scatter(mine, list(own(size, 2).unbind(0)) if here else None, first, group=group)
    t = own(3)
    td.reduce(t, first, group=group)
    found["reduced"] = t if here else None
    found["objects"] = everyone = [None] * size
    td.all_gather_object(everyone, td.get_rank(), group=group)
    box = [td.get_rank()]
    td.broadcast_object_list(box, first, group=group)
    found["box"] = box
    found["functional"] = functional.all_gather_tensor(own(2), 0, group) + 0
    found["functional piece"] = functional.reduce_scatter_tensor(own(size), "sum", 0, group) + 0
    return found


def messages(group: Any) -> dict:
    """To and from ranks of the group, and of the world."""
    rank, size = td.get_rank(group), td.get_world_size(group)
    found: dict[str, Any] = {}
    right, left = (rank + 1) % size, (rank - 1) % size
    came = poisoned(2)
    ring = [
        td.P2POp(td.isend, own(2), group=group, group_peer=right),
        td.P2POp(td.irecv, came, group=group, group_peer=left),
    ]
    for work in td.batch_isend_irecv(ring):
        work.wait()
    found["ring"] = came
    if rank == 0:
        td.send(own(3), group=group, group_dst=size - 1)
    elif rank == size - 1:
        found["by rank of the group"] = t = poisoned(3)
        found["said"] = td.recv(t, group=group, group_src=0)
    if rank == size - 1:
        td.send(own(3), td.get_global_rank(group, 0), group=group)
    elif rank == 0:
        found["from any"] = t = poisoned(3)
        found["sender"] = td.recv(t, group=group)
    return found


@case
def a_group_in_the_order_of_its_ranks(folder: str) -> dict:
    group = turned()
    return operations(group) | messages(group)


@case
def a_part_of_the_world_in_another_order(folder: str) -> dict:
    size = td.get_world_size()
    ranks = list(range(1, size)) + [0] if size < 4 else [3, 0, 2]
    group = td.new_group(ranks, **KEEPS)
    twice = td.new_group(ranks, **KEEPS)  # of the same ranks
    back = td.new_group(ranks)
    if td.get_rank() not in ranks:
        return {"outside": True}
    found = operations(group) | messages(group) | operations(twice)
    found = {"kept": found, "sorted": operations(back)}
    # torch names groups with use_local_synchronization by how many a rank has: leave no more here
    for each in (group, twice, back):
        td.destroy_process_group(each)
    return found


@case
def groups_made_of_a_group_in_another_order(folder: str) -> dict:
    group, size = turned(), td.get_world_size()
    own_group, _ = td.new_subgroups(size, group)
    counted, _ = td.new_subgroups_by_enumeration([list(reversed(range(size)))])
    return {"divided": operations(own_group), "counted": operations(counted)}


@case
def meshes_in_another_order(folder: str) -> dict:
    size = td.get_world_size()
    group = turned()
    found = {"of a group": operations(DeviceMesh.from_group(group, "cpu").get_group())}
    order = list(reversed(range(size)))
    wide = DeviceMesh("cpu", torch.tensor(order).reshape(1, size), mesh_dim_names=("a", "b"))
    found["turned"] = [wide.get_coordinate(), operations(wide.get_group("b"))]
    if size >= 4:
        grid = DeviceMesh("cpu", [[3, 1], [2, 0]], mesh_dim_names=("a", "b"))
        if td.get_rank() < 4:
            found["grid"] = [operations(grid.get_group(name)) for name in ("a", "b")]
            again = DeviceMesh.from_group(
                [grid.get_group("a"), grid.get_group("b")],
                "cpu",
                mesh=grid.mesh,
                mesh_dim_names=("a", "b"),
            )
            found["again"] = operations(again["a"].get_group())
    return found


@case
def DDP_in_a_group_in_another_order(folder: str) -> dict:
    torch.manual_seed(td.get_rank())
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    wrapped = nn.parallel.DistributedDataParallel(module, process_group=turned())
    found = {"start": [p.detach().clone() for p in module.parameters()]}
    wrapped(own(5, 3)).sum().backward()
    found["gradients"] = [p.grad for p in module.parameters()]
    return found
