"""Cases for tests/torch/bridge_same.py: FSDP, DTensor, tensor parallel, checkpoints."""

from __future__ import annotations

import os

import torch
import torch.distributed as td
import torch.distributed.checkpoint as dcp
from bridge_calls import at_least, own
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel as FSDP1,
)
from torch.distributed.fsdp import (
    MixedPrecisionPolicy,
    ShardingStrategy,
    StateDictType,
    fully_shard,
)
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

CASES = {}


def case(function):
    CASES[function.__name__.replace("_", " ")] = function
    return function


def mlp(width: int = 8) -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(
        nn.Linear(6, 2 * width),
        nn.Tanh(),
        nn.Linear(2 * width, width),
        nn.Tanh(),
        nn.Linear(width, 4),
    )


def train(model: nn.Module, steps: int = 3, optimizer=None, data=None) -> None:
    optimizer = optimizer or torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(steps):
        optimizer.zero_grad()
        model(own(4, 6) / 20 if data is None else data).square().mean().backward()
        optimizer.step()


def full(model: nn.Module) -> dict:
    """Whole parameters of a module of DTensors."""
    return {
        name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
        for name, p in model.named_parameters()
    }


@case
def FSDP1_strategies(folder: str) -> dict:
    found = {}
    for name in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"):
        model = FSDP1(
            mlp(),
            device_id=torch.device("cpu"),
            sharding_strategy=getattr(ShardingStrategy, name),
            use_orig_params=name == "SHARD_GRAD_OP",
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        train(model, optimizer=optimizer)
        model.clip_grad_norm_(0.1)
        with FSDP1.state_dict_type(model, StateDictType.FULL_STATE_DICT):
            found[name] = {k: v.clone() for k, v in model.state_dict().items()}
    return found


@case
@at_least(4)
def FSDP1_hybrid(folder: str) -> dict:
    mesh = init_device_mesh("cpu", (2, td.get_world_size() // 2), mesh_dim_names=("r", "s"))
    model = FSDP1(
        mlp(),
        device_mesh=mesh,
        device_id=torch.device("cpu"),
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
    )
    train(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.05))
    with FSDP1.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        return {k: v.clone() for k, v in model.state_dict().items()}


@case
def FSDP2(folder: str) -> dict:
    found = {}
    options = {"kept": {"reshard_after_forward": False}, "resharded": {}}
    options["mixed"] = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}
    for name, arguments in options.items():
        model = mlp()
        for layer in (model[0], model[2]):
            fully_shard(layer, **arguments)
        fully_shard(model, **arguments)
        train(model)
        model(own(4, 6)).float().sum().backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        found[name] = full(model) | {"norm": norm.full_tensor()}
    return found


@case
@at_least(4)
def FSDP2_hybrid_and_with_tensor_parallel(folder: str) -> dict:
    half = td.get_world_size() // 2
    mesh = init_device_mesh("cpu", (2, half), mesh_dim_names=("replicas", "shards"))
    hybrid = mlp()
    fully_shard(hybrid, mesh=mesh)
    train(hybrid)
    two = init_device_mesh("cpu", (half, 2), mesh_dim_names=("data", "tensor"))
    model = mlp()
    parallelize_module(model, two["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=two["data"])
    torch.manual_seed(40 + two["data"].get_local_rank())
    data = torch.randn(4, 6)
    train(model, data=data)
    return {"hybrid": full(hybrid), "2-D": full(model)}


@case
def DTensor(folder: str) -> dict:
    size = td.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    torch.manual_seed(2)
    whole = torch.randn(3 * size + 1, 2 * size + 1)
    rows = distribute_tensor(whole, mesh, [Shard(0)])
    columns = rows.redistribute(mesh, [Shard(1)])
    everywhere = columns.redistribute(mesh, [Replicate()])
    product = rows @ distribute_tensor(whole.t().contiguous(), mesh, [Replicate()])
    partial = columns @ distribute_tensor(whole.t().contiguous(), mesh, [Shard(0)])
    assert partial.placements == (Partial(),)
    x = rows.detach().requires_grad_()
    (x * 3).sum().backward()
    again = distribute_tensor(whole.clone(), mesh, [Shard(1)], src_data_rank=None)
    return {
        "rows": rows.to_local(),
        "columns": columns.to_local(),
        "everywhere": everywhere.to_local(),
        "product": product.full_tensor(),
        "partial": partial.full_tensor(),
        "scattered": partial.redistribute(mesh, [Shard(0)]).to_local(),
        "sum": rows.sum().full_tensor(),
        "gradient": x.grad.full_tensor(),
        "again": again.to_local(),
        "softmax": torch.softmax(columns, 1).full_tensor(),
    }


@case
def tensor_parallel(folder: str) -> dict:
    size = td.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    torch.manual_seed(8)
    model = nn.Sequential(
        nn.LayerNorm(8), nn.Linear(8, 4 * size), nn.GELU(), nn.Linear(4 * size, 8)
    )
    parallelize_module(
        model,
        mesh,
        {
            "0": SequenceParallel(sequence_dim=0),
            "1": ColwiseParallel(input_layouts=Shard(0)),
            "3": RowwiseParallel(),
        },
    )
    torch.manual_seed(4)
    train(model, data=torch.randn(2 * size, 8), optimizer=torch.optim.SGD(model.parameters(), 0.1))
    head = nn.Linear(8, 4 * size)
    parallelize_module(head, mesh, ColwiseParallel(use_local_output=False))
    with loss_parallel():
        logits = head(torch.randn(6, 8))
        loss = nn.functional.cross_entropy(logits, torch.arange(6) % (4 * size))
        loss.backward()
    return full(model) | {
        "loss": loss.full_tensor().detach(),
        "head": head.weight.grad.full_tensor(),
    }


@case
def checkpoints_and_resharding(folder: str) -> dict:
    """What N ranks have saved is loaded into other shards, and by a group of other size."""
    size = td.get_world_size()
    model = mlp()
    fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    train(model, optimizer=optimizer)
    weights, moments = get_state_dict(model, optimizer)
    path = os.path.join(folder, "saved")
    dcp.save({"model": weights, "optim": moments}, checkpoint_id=path)
    trained = full(model)
    train(model, optimizer=optimizer)
    went_on = full(model)
    again = mlp()
    fully_shard(again)
    second = torch.optim.Adam(again.parameters(), lr=0.5)
    weights, moments = get_state_dict(again, second)
    dcp.load({"model": weights, "optim": moments}, checkpoint_id=path)
    set_state_dict(again, second, model_state_dict=weights, optim_state_dict=moments)
    loaded = full(again)
    train(again, optimizer=second)
    torch.testing.assert_close(loaded, trained, rtol=0, atol=0)
    torch.testing.assert_close(full(again), went_on, rtol=0, atol=0)
    mesh = init_device_mesh("cpu", (size,))
    columns = {"0.weight": distribute_tensor(torch.zeros(16, 6), mesh, [Shard(1)])}
    plain = {"0.weight": torch.zeros(16, 6)}
    dcp.load({"model": columns}, checkpoint_id=path)
    dcp.load({"model": plain}, checkpoint_id=path)
    lone = [td.new_group([rank]) for rank in range(size)][td.get_rank()]
    alone = {"4.bias": torch.zeros(4)}
    dcp.load({"model": alone}, checkpoint_id=path, process_group=lone)
    future = dcp.async_save({"plain": plain}, checkpoint_id=path + "-async")
    future.result()
    third = {"0.weight": torch.zeros(16, 6)}
    dcp.load({"plain": third}, checkpoint_id=path + "-async")
    torch.testing.assert_close(third, plain, rtol=0, atol=0)
    torch.testing.assert_close(plain["0.weight"], trained["0.weight"], rtol=0, atol=0)
    torch.testing.assert_close(columns["0.weight"].full_tensor(), plain["0.weight"])
    torch.testing.assert_close(alone["4.bias"], trained["4.bias"], rtol=0, atol=0)
    return {"trained": trained, "went on": went_on, "columns": columns["0.weight"].to_local()}
