"""Tensor and sequence parallelism, and DTensor below them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from worlds import TORCH_ONLY, Case, World, suite

CASES: dict[str, Case] = {}
case = suite(CASES)


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        down: torch.Tensor = self.down(torch.relu(self.up(self.norm(x))))
        return down


def data() -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


def whole(tensor: Any) -> torch.Tensor:
    value = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return value.detach().clone()


def trained(model: nn.Module, x: torch.Tensor) -> dict[str, Any]:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = whole_loss = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append(whole(whole_loss))
    return {"losses": losses, **{name: whole(p) for name, p in model.named_parameters()}}


def plain() -> dict[str, Any]:
    return trained(MLP(), data())


def close(found: dict[str, Any]) -> dict[str, Any]:
    """The same as without parallelism."""
    for name, value in plain().items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)
    return found


@case(*TORCH_ONLY)
def columns_then_rows(world: World) -> Any:
    mesh = init_device_mesh("cpu", (world.size,))
    model = parallelize_module(MLP(), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    found = close(trained(model, data()))
    assert isinstance(model.up.weight, DTensor) and model.up.weight.placements == (Shard(0),)
    return found


@case(*TORCH_ONLY)
def sequence_parallel(world: World) -> Any:
    mesh = init_device_mesh("cpu", (world.size,))
    plan = {
        "norm": SequenceParallel(sequence_dim=0),
        "up": PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate()),
    }
    model = parallelize_module(MLP(), mesh, plan)
    model = parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return close(trained(model, data()))


@case(*TORCH_ONLY)
def a_parallel_loss(world: World) -> Any:
    mesh = init_device_mesh("cpu", (world.size,))
    torch.manual_seed(0)
    logits = torch.randn(4, 4 * world.size)
    target = torch.tensor([1, 0, 3, 2])
    own = logits.clone().requires_grad_()
    nn.functional.cross_entropy(own, target).backward()
    split = distribute_tensor(logits, mesh, [Shard(1)]).requires_grad_()
    with loss_parallel():
        loss = nn.functional.cross_entropy(split, distribute_tensor(target, mesh, [Replicate()]))
        loss.backward()
    torch.testing.assert_close(whole(split.grad), own.grad)
    return [whole(loss), whole(split.grad)]


@case(*TORCH_ONLY)
def an_embedding(world: World) -> Any:
    mesh = init_device_mesh("cpu", (world.size,))
    torch.manual_seed(0)
    table = nn.Embedding(4 * world.size, 6)
    indices = torch.arange(8).reshape(2, 4)
    expected = table(indices).detach().clone()
    found = []
    for layout in (
        RowwiseParallel(input_layouts=Replicate()), ColwiseParallel(output_layouts=Replicate()),
    ):  # fmt: skip
        torch.manual_seed(0)
        split = parallelize_module(nn.Embedding(4 * world.size, 6), mesh, layout)
        got = split(indices)
        torch.testing.assert_close(whole(got), expected)
        found.append(whole(got))
    return found


@case(*TORCH_ONLY)
def placements(world: World) -> Any:
    mesh = init_device_mesh("cpu", (world.size,))
    tensor = torch.arange(6.0 * world.size).reshape(2 * world.size, 3)
    rows = distribute_tensor(tensor, mesh, [Shard(0)])
    found = {
        "columns": rows.redistribute(mesh, [Shard(1)]).to_local(),
        "whole": rows.full_tensor(),
        "sum": whole(rows.sum()),
        "matrix": whole(rows @ rows.t()),
    }
    parts = DTensor.from_local(tensor * (world.rank + 1), mesh, [Partial()])
    found["partial"] = parts.redistribute(mesh, [Replicate()]).to_local()
    uneven = distribute_tensor(torch.arange(2.0 * world.size + 1), mesh, [Shard(0)])
    found["uneven"] = uneven.to_local()
    found["uneven whole"] = uneven.full_tensor()
    return found


@case(*TORCH_ONLY, least=4)
def with_data_parallelism(world: World) -> Any:
    from torch.nn.parallel import DistributedDataParallel

    mesh = init_device_mesh("cpu", (2, world.size // 2), mesh_dim_names=("dp", "tp"))
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    model = parallelize_module(MLP(), mesh["tp"], plan)
    from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform

    _pre_dp_module_transform(model)
    wrapped = DistributedDataParallel(model, process_group=mesh.get_group("dp"))
    optimizer = torch.optim.SGD(wrapped.parameters(), 0.1)
    half = data().chunk(2)[mesh.get_local_rank("dp")]
    for _ in range(3):
        optimizer.zero_grad()
        wrapped(half).pow(2).mean().backward()
        optimizer.step()
    return [whole(p) for p in wrapped.parameters()]
