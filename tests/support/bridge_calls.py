"""Cases for tests/torch/bridge_same.py: operations, objects, messages, meshes.

Each gives what its ranks ended with; the runner compares it with what gloo gave.
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as td
import torch.distributed.nn.functional as differentiable
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

CASES = {}


def case(function):
    CASES[function.__name__.replace("_", " ")] = function
    return function


def at_least(ranks: int):
    """A case that needs so many ranks."""

    def mark(function):
        function.least = ranks
        return function

    return mark


def own(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Numbers of this rank's own."""
    generator = torch.Generator().manual_seed(100 + td.get_rank())
    return (torch.rand(*shape, generator=generator) * 20).to(dtype)


def poisoned(*shape: int) -> torch.Tensor:
    return torch.full(shape, -77.0)


def gather_into_one(name: str, own: torch.Tensor, together: torch.Tensor, root: int) -> None:
    """By a function of torch 2.14 that gloo does not have; else by the one that all have."""
    here = td.get_rank() == root
    if hasattr(td, name) and td.get_backend() == "hpcdist":
        getattr(td, name)(own, together if here else None, dst=root)
    else:
        td.gather(own, list(together.unbind(0)) if here else None, dst=root)


@case
def collectives(folder: str) -> dict:
    rank, size = td.get_rank(), td.get_world_size()
    found = {}
    for name in ("SUM", "PRODUCT", "MIN", "MAX"):
        for dtype in (torch.float32, torch.float64, torch.int64):
            found[f"{name} {dtype}"] = t = own(5, 3, dtype=dtype)
            td.all_reduce(t, getattr(td.ReduceOp, name))
    for name in ("BAND", "BOR", "BXOR"):
        found[name] = t = own(7, dtype=torch.int32)
        td.all_reduce(t, getattr(td.ReduceOp, name))
    for root in (0, size - 1):
        found[f"broadcast {root}"] = t = own(4)
        td.broadcast(t, root)
        t = own(4)
        td.reduce(t, root, op=td.ReduceOp.MAX)
        found[f"reduce {root}"] = t if rank == root else own(1)
        kept = [poisoned(2, 2) for _ in range(size)] if rank == root else None
        td.gather(own(2, 2), kept, dst=root)
        found[f"gather {root}"] = kept
        for name in ("gather_single", "gather_into_tensor"):
            found[f"{name} {root}"] = together = poisoned(size, 2)
            gather_into_one(name, own(2), together, root)
        parts = [own(3) + i for i in range(size)] if rank == root else None
        found[f"scatter {root}"] = t = poisoned(3)
        td.scatter(t, parts, src=root)
    found["all_gather"] = outs = [poisoned(3) for _ in range(size)]
    td.all_gather(outs, own(3))
    found["all_gather_into_tensor"] = t = poisoned(size * 2, 3)
    td.all_gather_into_tensor(t, own(2, 3))
    found["reduce_scatter"] = t = poisoned(3)
    td.reduce_scatter(t, [own(3) + i for i in range(size)])
    found["reduce_scatter_tensor"] = t = poisoned(2)
    td.reduce_scatter_tensor(t, own(2 * size))
    found["all_to_all_single"] = t = poisoned(2 * size)
    td.all_to_all_single(t, own(2 * size))
    sends = [(rank + r) % 3 for r in range(size)]
    comes = [(rank + r) % 3 for r in range(size)]
    found["uneven"] = t = poisoned(sum(comes))
    td.all_to_all_single(t, own(sum(sends)), comes, sends)
    works = [td.all_reduce(own(3), async_op=True) for _ in range(3)]
    assert all(work.wait(timedelta(seconds=20)) for work in works)
    found["futures"] = td.all_reduce(own(3), async_op=True).get_future().wait()
    td.barrier()
    return found


@case
def tensors_that_share_memory(folder: str) -> dict:
    """An input that lies in an output, wherever gloo gets it right."""
    rank, size = td.get_rank(), td.get_world_size()
    found = {}

    def filled(place: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
        whole = poisoned(size * 3)
        parts = list(whole.split(3))
        parts[place].copy_(own(3))
        return whole, parts

    for place in range(size):
        found[f"all_gather {place}"], parts = filled(place)
        td.all_gather(parts, parts[place])
        whole, parts = filled(place)
        td.all_gather_into_tensor(whole, parts[place])
        found[f"all_gather_into_tensor {place}"] = whole
        found[f"gather {place}"], parts = filled(place)
        td.gather(parts[place], parts if rank == 0 else None, dst=0)
        whole = own(size * 3)
        found[f"reduce_scatter_tensor {place}"] = part = whole.split(3)[place]
        td.reduce_scatter_tensor(part, whole)
    return found


@case
def sparse_tensors(folder: str) -> dict:
    rank, found = td.get_rank(), {}
    for requires in (False, True):
        places, values = torch.tensor([[rank, 2, 2]]), own(3, 2)
        t = torch.sparse_coo_tensor(places, values, (8, 2)).requires_grad_(requires)
        with torch.no_grad():
            td.all_reduce(t)
            found[f"all_reduce {requires}"] = t.to_dense()
    return found


@case
def objects(folder: str) -> dict:
    rank, size = td.get_rank(), td.get_world_size()
    mine = {"rank": rank, "list": list(range(rank)), "tensor": own(2)}
    everyone: list = [None] * size
    td.all_gather_object(everyone, mine)
    kept: list | None = [None] * size if rank == 1 else None
    td.gather_object(mine, kept, dst=1)
    box = [mine, rank]
    td.broadcast_object_list(box, src=1)
    got: list = [None]
    td.scatter_object_list(got, [{"part": r} for r in range(size)] if rank == 0 else None, src=0)
    if rank == 0:
        td.send_object_list([mine, "over"], dst=1)
    sent: list = [None, None]
    if rank == 1:
        td.recv_object_list(sent, src=0)
    return {"all": everyone, "gathered": kept, "box": box, "scattered": got, "sent": sent}


@case
def messages(folder: str) -> dict:
    rank, size = td.get_rank(), td.get_world_size()
    right, left = (rank + 1) % size, (rank - 1) % size
    came = poisoned(3)
    ring = [td.P2POp(td.isend, own(3), right), td.P2POp(td.irecv, came, left)]
    for work in td.batch_isend_irecv(ring):
        work.wait()
    tagged = [poisoned(2) for _ in range(2)]
    works = [td.isend(own(2) + tag, right, tag=tag) for tag in (5, 6)]
    works += [td.irecv(tagged[tag - 5], left, tag=tag) for tag in (6, 5)]
    for work in works:
        work.wait()
    any_source = poisoned(size - 1)
    if rank:
        td.send(own(1), 0)
    else:
        for _ in range(size - 1):
            one = poisoned(1)
            source = td.recv(one)
            any_source[source - 1] = one.item()
    refused = []
    for call, other in ((td.send, right), (td.isend, right), (td.recv, left), (td.irecv, left)):
        try:
            call(poisoned(6).reshape(2, 3).t(), other)
        except (RuntimeError, ValueError) as error:  # gloo's and hpcdist's
            refused.append((call.__name__, "contiguous" in str(error)))
    return {"ring": came, "tagged": tagged, "any": any_source, "refused": refused}


@case
def groups(folder: str) -> dict:
    rank, size = td.get_rank(), td.get_world_size()
    found = {}
    halves = [td.new_group(list(range(first, size, 2))) for first in (0, 1)]
    group = halves[rank % 2]
    found["half"] = t = own(3)
    td.all_reduce(t, group=group)
    own_group, all_groups = td.new_subgroups(1)
    found["lone"] = t = own(2)
    td.all_reduce(t, group=own_group)
    assert len(all_groups) == size
    # every rank makes one: gloo of torch 2.15 waits in the next group for ranks that made none
    local = td.new_group(list(range(rank % 2, size, 2)), use_local_synchronization=True)
    found["local"] = t = own(2)
    td.broadcast(t, src=rank % 2, group=local)
    td.destroy_process_group(local)
    described = td.new_group(group_desc="described")
    found["names"] = (described.group_desc, described.size(), described.rank(), described.name())
    found["names"] = found["names"][:3]
    found["ranks"] = torch.tensor(
        [td.get_group_rank(group, rank), td.get_global_rank(group, 0), td.get_rank(group)]
    )
    return found


@case
def differentiable_collectives(folder: str) -> dict:
    size = td.get_world_size()

    def gradient(function) -> torch.Tensor:
        x = own(2 * size).requires_grad_()
        y = function(x)
        together = y if isinstance(y, torch.Tensor) else torch.cat([p.flatten() for p in y])
        (together * together).sum().backward()
        return torch.cat([together.detach(), x.grad])

    nn = differentiable
    return {
        "all_reduce": gradient(nn.all_reduce),
        "broadcast": gradient(lambda x: nn.broadcast(x, 0)),
        "all_gather": gradient(nn.all_gather),
        # what other ranks hold afterwards is not defined
        "reduce": gradient(lambda x: nn.reduce(x, 0) * (td.get_rank() == 0)),
        "gather": gradient(lambda x: nn.gather(x, 0)),
        "scatter": gradient(lambda x: nn.scatter(list(x.chunk(size)), 0)),
        "reduce_scatter": gradient(lambda x: nn.reduce_scatter(poisoned(2), list(x.chunk(size)))),
        "all_to_all": gradient(
            lambda x: nn.all_to_all([poisoned(2) for _ in range(size)], list(x.chunk(size)))
        ),
        "all_to_all_single": gradient(lambda x: nn.all_to_all_single(poisoned(2 * size), x)),
    }


@case
@at_least(4)
def device_mesh(folder: str) -> dict:
    size = td.get_world_size()
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("rows", "columns"))
    found = {"at": torch.tensor(mesh.get_coordinate())}
    for name in ("rows", "columns"):
        found[name] = t = own(2)
        td.all_reduce(t, group=mesh.get_group(name))
        assert mesh[name].size() == td.get_world_size(mesh.get_group(name))
    found["flat"] = t = own(2)
    td.all_reduce(t, group=mesh._flatten("flat").get_group())
    groups = [mesh.get_group(name) for name in ("rows", "columns")]
    again = DeviceMesh.from_group(groups, "cpu", mesh=mesh.mesh, mesh_dim_names=("rows", "columns"))
    found["again"] = t = own(2)
    td.all_reduce(t, group=again["columns"].get_group())
    return found
