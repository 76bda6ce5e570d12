"""What torch tests in spawned processes: tensors in shared memory, autograd of collectives."""

from __future__ import annotations

from typing import Any

import torch
from worlds import Case, World, filled, suite

CASES: dict[str, Case] = {}
case = suite(CASES)


def shared(world: World, *shape: int) -> torch.Tensor:
    return filled(world, *shape).share_memory_()


@case()
def collectives_on_shared_memory(world: World) -> Any:
    dist = world.dist
    a, b = shared(world, 3, 2), shared(world, 3, 2)
    dist.broadcast(a, 0)
    dist.all_reduce(b)
    parts = [shared(world, 3, 2) for _ in range(world.size)]
    dist.all_gather(parts, shared(world, 3, 2) * 2)
    into = torch.zeros(3 * world.size, 2).share_memory_()
    dist.all_gather_into_tensor(into, a)
    return [a, b, parts, into, a.is_shared()]


def gradient(world: World, function: Any, *shape: int) -> list[torch.Tensor]:
    """The result of a differentiable collective, and the gradient of its weighted sum."""
    x = filled(world, *shape).requires_grad_()
    y = function(x)
    y = torch.stack([t for t in y]) if isinstance(y, tuple | list) else y
    (y * torch.arange(1.0, y.numel() + 1).reshape(y.shape) * (world.rank + 1)).sum().backward()
    assert x.grad is not None
    return [y.detach(), x.grad]


@case()
def autograd_of_reductions(world: World) -> Any:
    f = world.at("nn.functional")
    return {
        "broadcast": gradient(world, lambda x: f.broadcast(x, 0), 3),
        "all_reduce": gradient(world, lambda x: f.all_reduce(x), 3),
        "max": gradient(world, lambda x: f.all_reduce(x, op=world.dist.ReduceOp.SUM), 2, 2),
        "reduce": gradient(world, lambda x: f.reduce(x.clone(), 0), 3)[1],
    }


@case()
def autograd_of_moves(world: World) -> Any:
    f = world.at("nn.functional")
    size = world.size
    empty = [torch.empty(2) for _ in range(size)]
    return {
        "all_gather": gradient(world, lambda x: f.all_gather(x), 3),
        "all_to_all": gradient(
            world, lambda x: f.all_to_all(list(empty), list(x.reshape(size, 2).unbind(0))), 2 * size
        ),
        "all_to_all_single": gradient(
            world, lambda x: f.all_to_all_single(torch.empty(2 * size), x), 2 * size
        ),
        "reduce_scatter": gradient(
            world,
            lambda x: f.reduce_scatter(torch.empty(2), list(x.reshape(size, 2).unbind(0))),
            2 * size,
        )
        if world.side != "gloo"
        else summed(world),
    }


def summed(world: World) -> list[torch.Tensor]:
    """What reduce_scatter gives, which gloo has not: by all_reduce and a slice."""
    f = world.at("nn.functional")
    rank = world.rank
    return gradient(world, lambda x: f.all_reduce(x)[2 * rank : 2 * rank + 2], 2 * world.size)


@case()
def second_use_of_a_gradient(world: World) -> Any:
    """A collective in the middle of a network, twice, and through a module's parameters."""
    f = world.at("nn.functional")
    torch.manual_seed(3)
    layer = torch.nn.Linear(4, 4)
    x = f.all_reduce(layer(filled(world, 2, 4)))
    y = torch.cat(list(f.all_gather(layer(x / 100))))
    y.pow(2).mean().backward()
    return [y.detach(), layer.weight.grad, layer.bias.grad]
