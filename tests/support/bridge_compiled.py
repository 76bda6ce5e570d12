"""Cases for tests/torch/bridge_same.py: torch.compile of steps with collectives in them."""

from __future__ import annotations

import torch
import torch.distributed as td
import torch.distributed._functional_collectives as functional
from bridge_calls import own
from bridge_training import DDP, branches, state, train

CASES = {}


def case(function):
    CASES[function.__name__.replace("_", " ")] = function
    return function


@case
def compiled_collectives(folder: str) -> dict:
    """One graph, by the default compiler, with collectives between computations."""
    size = td.get_world_size()

    @torch.compile(fullgraph=True)
    def step(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        summed = functional.all_reduce(x * 2, "sum", td.group.WORLD)
        whole = functional.all_gather_tensor(torch.sin(summed), 0, td.group.WORLD)
        part = functional.reduce_scatter_tensor(whole + 1, "sum", 0, td.group.WORLD)
        spread = functional.all_to_all_single(part * x, None, None, td.group.WORLD)
        return summed + 1, whole, part, spread

    return dict(enumerate(step(own(2 * size, 3) / 20)))


@case
def compiled_calls_in_place(folder: str) -> dict:
    """torch.distributed's own functions, which the compiler turns into functional ones."""
    size = td.get_world_size()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = x * 2
        td.all_reduce(x)
        out = torch.empty(size * x.shape[0], x.shape[1])
        td.all_gather_into_tensor(out, x)
        return x + 1, out * 3

    return dict(enumerate(step(own(2, 3))))


@case
def compiled_DDP(folder: str) -> dict:
    model = DDP(branches())
    compiled = torch.compile(model, backend="aot_eager")
    train(compiled, 3)
    return state(model)
