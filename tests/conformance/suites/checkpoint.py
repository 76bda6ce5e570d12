"""torch.distributed.checkpoint: saved by some ranks, read by others."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as td
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from worlds import TORCH_ONLY, Case, World, error_of, filled, suite

CASES: dict[str, Case] = {}
case = suite(CASES)


def net() -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))


def place(world: World, name: str) -> str:
    return os.path.join(world.folder, name)


@case(*TORCH_ONLY)
def plain_tensors_and_objects(world: World) -> Any:
    state = {"t": filled(world, 3), "n": {"deep": torch.ones(2), "step": 7, "text": "x"}}
    dcp.save(state, checkpoint_id=place(world, "plain"))
    found = {"t": torch.zeros(3), "n": {"deep": torch.zeros(2), "step": 0, "text": ""}}
    dcp.load(found, checkpoint_id=place(world, "plain"))
    names = sorted(os.listdir(place(world, "plain")))
    return [found, ".metadata" in names]


@case(*TORCH_ONLY)
def sharded_otherwise(world: World) -> Any:
    """Saved by rows, read by columns, whole, and onto half of the ranks."""
    mesh = init_device_mesh("cpu", (world.size,))
    whole = torch.arange(16.0 * world.size).reshape(2 * world.size, 8)
    dcp.save({"w": distribute_tensor(whole, mesh, [Shard(0)])}, checkpoint_id=place(world, "rows"))
    found = []
    for placement in (Shard(1), Replicate(), Shard(0)):
        empty = distribute_tensor(torch.zeros_like(whole), mesh, [placement])
        dcp.load({"w": empty}, checkpoint_id=place(world, "rows"))
        found.append(empty.to_local().clone())
    plain = {"w": torch.zeros_like(whole)}
    dcp.load(plain, checkpoint_id=place(world, "rows"))
    return [*found, plain["w"]]


@case(*TORCH_ONLY)
def a_model_and_its_optimizer(world: World) -> Any:
    model = nn.parallel.DistributedDataParallel(net())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    model(filled(world, 2, 4) / 50).sum().backward()
    optimizer.step()
    saved, moments = get_state_dict(model, optimizer)
    dcp.save({"model": saved, "optim": moments}, checkpoint_id=place(world, "model"))
    other = nn.parallel.DistributedDataParallel(net())
    second = torch.optim.Adam(other.parameters(), lr=0.01)
    into, into_moments = get_state_dict(other, second)
    both = {"model": into, "optim": into_moments}
    dcp.load(both, checkpoint_id=place(world, "model"))
    set_state_dict(other, second, model_state_dict=both["model"], optim_state_dict=both["optim"])
    other(filled(world, 2, 4) / 50).sum().backward()
    second.step()
    return [list(both["model"]), [p.detach().clone() for p in other.parameters()]]


@case(*TORCH_ONLY)
def fully_sharded(world: World) -> Any:
    from torch.distributed.fsdp import fully_shard

    if world.side == "gloo":  # its gradients go through reduce_scatter, which gloo has not
        model = net()
        state = {name: value.clone() for name, value in model.state_dict().items()}
        dcp.save(state, checkpoint_id=place(world, "fsdp"))
    else:
        model = fully_shard(net())
        dcp.save(get_model_state_dict(model), checkpoint_id=place(world, "fsdp"))
    plain = {name: torch.zeros_like(value) for name, value in net().state_dict().items()}
    dcp.load(plain, checkpoint_id=place(world, "fsdp"))
    return plain


@case(*TORCH_ONLY)
def whole_from_rank_zero(world: World) -> Any:
    model = net()
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    state = {name: value * 3 for name, value in model.state_dict().items()}
    set_model_state_dict(model, state if world.rank == 0 else {}, options=options)
    return [p.detach().clone() for p in model.parameters()]


@case(*TORCH_ONLY)
def beside_the_training(world: World) -> Any:
    """async_save in a group of its own, while the ranks go on."""
    own = td.new_group(backend=td.get_backend())
    state = {"t": filled(world, 64), "step": 3}
    pending = dcp.async_save(state, checkpoint_id=place(world, "async"), process_group=own)
    for _ in range(5):
        td.all_reduce(torch.ones(8))
    pending.result()
    td.barrier()
    found = {"t": torch.zeros(64), "step": 0}
    dcp.load(found, checkpoint_id=place(world, "async"))
    return found


@case(*TORCH_ONLY)
def errors_reach_all_ranks(world: World) -> Any:
    dcp.save({"t": torch.ones(2)}, checkpoint_id=place(world, "small"))
    kinds = (dcp.api.CheckpointException, RuntimeError)

    def read(name: str, count: int, folder: str) -> str:
        state = {name: torch.ones(count)}
        return error_of(lambda: dcp.load(state, checkpoint_id=place(world, folder)), *kinds)

    return [read("none", 2, "small"), read("t", 3, "small"), read("t", 2, "no")]


@case(*TORCH_ONLY)
def by_one_rank_alone(world: World) -> Any:
    path = place(world, "alone")
    if world.rank == 0:
        dcp.save({"t": torch.arange(4.0)}, checkpoint_id=path, no_dist=True)
    td.barrier()
    found = {"t": torch.zeros(4)}
    dcp.load(found, checkpoint_id=path, no_dist=True)
    return found
