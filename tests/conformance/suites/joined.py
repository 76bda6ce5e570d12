"""Join: ranks with unequal numbers of inputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from worlds import TORCH_ONLY, Case, World, error_of, suite

CASES: dict[str, Case] = {}
case = suite(CASES)


def net() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))


def inputs(world: World, extra: int = 1) -> list[torch.Tensor]:
    """More of them on higher ranks."""
    generator = torch.Generator().manual_seed(world.rank)
    return [torch.randn(3, 4, generator=generator) for _ in range(2 + extra * world.rank)]


def after(model: nn.Module) -> list[Any]:
    return [
        *(p.detach().clone() for p in model.parameters()),
        *(p.grad for p in model.parameters()),
    ]


def train(model: nn.Module, data: list[torch.Tensor], optimizer: Any) -> None:
    for x in data:
        optimizer.zero_grad()
        model(x).pow(2).sum().backward()
        optimizer.step()


def with_ddp(world: World, **options: Any) -> Any:
    model = world.DDP(net())
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    with model.join(**options):
        train(model, inputs(world), optimizer)
    parameters = [p.detach().clone() for p in model.parameters()]
    optimizer.zero_grad()
    train(model, inputs(world, 0), optimizer)  # the world is whole again
    return [parameters, after(model)]


@case()
def ddp_by_initial_world(world: World) -> Any:
    return with_ddp(world)


@case()
def ddp_by_those_present(world: World) -> Any:
    return with_ddp(world, divide_by_initial_world_size=False)


@case()
def ddp_without_join(world: World) -> Any:
    model = world.DDP(net())
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    with model.join(enable=False):
        train(model, inputs(world, 0), optimizer)
    return after(model)


@case("native")
def ddp_and_zero_as_the_whole_optimizer(world: World) -> Any:
    """A rank that has run out steps its share with the others' gradients."""
    model = world.DDP(net())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with model.join():
        train(model, inputs(world), optimizer)
    for ours, whole in zip(ddp_and_zero(world), model.parameters(), strict=True):
        torch.testing.assert_close(ours, whole)
    return True


@case(*TORCH_ONLY)
def ddp_and_zero(world: World) -> Any:
    """Here it steps its share with its own last gradients: the outcome is of torch's making."""
    model = world.DDP(net())
    optimizer = world.at("optim").ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.Adam, lr=0.01
    )
    with world.at("algorithms.join").Join([model, optimizer]):
        train(model, inputs(world), optimizer)
    return [p.detach().clone() for p in model.parameters()]


@case(least=2)
def an_early_end_is_an_error(world: World) -> Any:
    model = world.DDP(net())
    optimizer = torch.optim.SGD(model.parameters(), 0.05)

    def run() -> None:
        with model.join(throw_on_early_termination=True):
            train(model, inputs(world), optimizer)

    return error_of(run, RuntimeError)


def counting(world: World) -> Any:
    """A Joinable that all-reduces, and shadows it with zeros where a rank has run out."""
    join = world.at("algorithms.join")
    dist = world.dist

    class Hook(join.JoinHook):  # type: ignore[misc, name-defined]
        def __init__(self, owner: Any) -> None:
            self.owner = owner

        def main_hook(self) -> None:
            dist.all_reduce(torch.zeros(2))

        def post_hook(self, is_last_joiner: bool) -> None:
            self.owner.last = is_last_joiner

    class Counter(join.Joinable):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.last = False

        def __call__(self) -> torch.Tensor:
            join.Join.notify_join_context(self)
            total = torch.tensor([1.0, float(world.rank)])
            dist.all_reduce(total)
            return total

        def join_hook(self, **kwargs: Any) -> Any:
            return Hook(self)

        @property
        def join_device(self) -> torch.device:
            return torch.device("cpu")

        @property
        def join_process_group(self) -> Any:
            return world.at("distributed_c10d")._get_default_group()

    return Counter()


@case()
def a_joinable_of_ones_own(world: World) -> Any:
    counter = counting(world)
    with world.at("algorithms.join").Join([counter]):
        seen = [counter() for _ in range(2 + world.rank)]
    return [seen, counter.last]


@case()
def several_joinables(world: World) -> Any:
    model, counter = world.DDP(net()), counting(world)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    seen = []
    with world.at("algorithms.join").Join([counter, model]):
        for x in inputs(world):
            seen.append(counter())
            train(model, [x], optimizer)
    return [seen, [p.detach().clone() for p in model.parameters()]]
