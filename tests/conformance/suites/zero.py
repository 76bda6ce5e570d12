"""ZeroRedundancyOptimizer."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from worlds import Case, World, error_of, suite

CASES: dict[str, Case] = {}
case = suite(CASES)


def net(seed: int = 4) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 9), nn.ReLU(), nn.Linear(9, 4), nn.Linear(4, 2))


def steps(world: World, model: nn.Module, optimizer: Any, count: int = 3) -> None:
    for step in range(count):
        generator = torch.Generator().manual_seed(step)
        optimizer.zero_grad()
        model(torch.randn(4, 5, generator=generator)).pow(2).sum().backward()
        optimizer.step()


def zero(world: World) -> Any:
    return world.at("optim").ZeroRedundancyOptimizer


@case()
def as_the_local_optimizer(world: World) -> Any:
    found = {}
    for kind, options in (
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        (torch.optim.Adam, {"lr": 0.01}),
        (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    ):
        for view in (False, True):
            model, plain = net(), net()
            optimizer = zero(world)(
                model.parameters(), kind, parameters_as_bucket_view=view, **options
            )
            steps(world, model, optimizer)
            steps(world, plain, kind(plain.parameters(), **options))
            parameters = [p.detach().clone() for p in model.parameters()]
            for ours, local in zip(parameters, plain.parameters(), strict=True):
                torch.testing.assert_close(ours, local)
            found[f"{kind.__name__} {view}"] = parameters
    return found


@case()
def state_and_checkpoint(world: World) -> Any:
    model = net()
    optimizer = zero(world)(model.parameters(), torch.optim.Adam, lr=0.01)
    steps(world, model, optimizer)
    early = error_of(optimizer.state_dict, RuntimeError) if world.rank == 0 else ""
    optimizer.consolidate_state_dict(to=0)
    boxes: list[Any] = [optimizer.state_dict() if world.rank == 0 else None]
    state = boxes[0]
    found: dict[str, Any] = {"early": early}
    if state is not None:
        found["groups"] = [group["params"] for group in state["param_groups"]]
        found["state"] = {
            str(index): {name: value for name, value in sorted(one.items())}
            for index, one in sorted(state["state"].items())
        }
    flat = torch.zeros(1) if state is None else torch.tensor([float(len(state["state"]))])
    world.dist.broadcast(flat, 0)
    return [found, flat]


@case()
def groups_of_parameters(world: World) -> Any:
    model = net()
    first, *rest = model.children()
    options = [{"params": list(first.parameters()), "lr": 0.5}]
    optimizer = zero(world)(options, torch.optim.SGD, lr=0.1)
    for layer in rest:
        parameters = list(layer.parameters())
        if parameters:
            optimizer.add_param_group({"params": parameters, "lr": 0.01, "momentum": 0.5})
    steps(world, model, optimizer)
    return [
        [p.detach().clone() for p in model.parameters()],
        [[len(g["params"]), g["lr"]] for g in optimizer.param_groups],
    ]


@case()
def a_schedule(world: World) -> Any:
    model = net()
    optimizer = zero(world)(model.parameters(), torch.optim.SGD, lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    rates = []
    for _ in range(3):
        steps(world, model, optimizer, 1)
        schedule.step()
        rates.append(optimizer.param_groups[0]["lr"])
    return [rates, [p.detach().clone() for p in model.parameters()]]


@case()
def a_closure(world: World) -> Any:
    model = net()
    optimizer = zero(world)(model.parameters(), torch.optim.SGD, lr=0.1)
    data = torch.ones(2, 5)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(data).pow(2).sum()
        loss.backward()
        return loss

    losses = [optimizer.step(closure).detach().clone() for _ in range(3)]
    return [losses, [p.detach().clone() for p in model.parameters()]]


@case()
def with_ddp(world: World) -> Any:
    model = world.DDP(net())
    optimizer = zero(world)(model.parameters(), torch.optim.Adam, lr=0.01)
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + world.rank)
        optimizer.zero_grad()
        model(torch.randn(4, 5, generator=generator)).pow(2).sum().backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


@case()
def wrong_arguments(world: World) -> Any:
    model = net()
    kinds = (TypeError, ValueError)
    make = zero(world)
    return [
        error_of(lambda: make([], torch.optim.SGD, lr=0.1), *kinds),
        error_of(lambda: make(torch.ones(3), torch.optim.SGD, lr=0.1), *kinds),
        error_of(lambda: make(["a"], torch.optim.SGD, lr=0.1), *kinds),
        error_of(lambda: make(model.parameters(), torch.optim.SGD, lr=0.1), *kinds),
    ]
