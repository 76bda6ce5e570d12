"""Cases for tests/torch/bridge_same.py: torch's own DDP, its optimizers, pipelines."""

from __future__ import annotations

import torch
import torch.distributed as td
from bridge_calls import at_least, own
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.algorithms.model_averaging.hierarchical_model_averager import (
    HierarchicalModelAverager,
)
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP

CASES = {}


def case(function):
    CASES[function.__name__.replace("_", " ")] = function
    return function


class Branches(nn.Module):
    """Some of its parameters may take no part; it also has a buffer that forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 12)
        self.left, self.right = nn.Linear(12, 4), nn.Linear(12, 4)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: torch.Tensor, way: str = "both") -> torch.Tensor:
        self.seen += x.mean()
        hidden = torch.tanh(self.first(x))
        parts = {"left": [self.left], "right": [self.right]}.get(way, [self.left, self.right])
        return sum(part(hidden) for part in parts)


def branches() -> Branches:
    torch.manual_seed(5)
    return Branches()


def train(model, steps: int = 3, optimizer=None, ways=None, rows: int = 4) -> None:
    """Steps with this rank's own data."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        x = own(rows, 6) / 20 + step
        out = model(x) if ways is None else model(x, ways[step % len(ways)])
        out.square().mean().backward()
        optimizer.step()


def state(model: nn.Module) -> dict:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


@case
def DDP_plain(folder: str) -> dict:
    model = DDP(branches())
    train(model)
    return state(model)


@case
def DDP_buckets_and_views(folder: str) -> dict:
    model = DDP(branches(), gradient_as_bucket_view=True, bucket_cap_mb=0.0001)
    train(model)
    return state(model)


@case
def DDP_unused_parameters(folder: str) -> dict:
    model = DDP(branches(), find_unused_parameters=True)
    rank = td.get_rank()
    train(model, 4, ways=["left", "both", ["left", "right"][rank % 2], "right"])
    return state(model)


@case
def DDP_static_graph(folder: str) -> dict:
    model = DDP(branches(), static_graph=True)
    train(model, ways=["left"])
    return state(model)


@case
def DDP_no_sync_and_no_buffers(folder: str) -> dict:
    model = DDP(branches(), broadcast_buffers=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(2):
        with model.no_sync():
            model(own(4, 6) / 20).square().mean().backward()
        model(own(4, 6) / 10).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return state(model)


@case
def DDP_join(folder: str) -> dict:
    model = DDP(branches())
    with model.join():
        train(model, 2 + td.get_rank())
    return state(model)


@case
def DDP_join_divided_by_those_present(folder: str) -> dict:
    model = DDP(branches(), bucket_cap_mb=0.0005)
    with model.join(divide_by_initial_world_size=False):
        train(model, 2 + 2 * td.get_rank())
    return state(model)


@case
def DDP_error_in_join(folder: str) -> dict:
    """Who asks for it is told on all ranks that the inputs were uneven."""
    model = DDP(branches())
    said = ""
    try:
        with model.join(throw_on_early_termination=True):
            train(model, 2 + td.get_rank())
    except RuntimeError as error:
        said = "exhausted" if "exhausted" in str(error) else str(error)
    return {"said": said}


@case
def ZeRO(folder: str) -> dict:
    found = {}
    for view in (False, True):
        model = DDP(branches())
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.Adam, lr=0.02, parameters_as_bucket_view=view
        )
        train(model, optimizer=optimizer)
        optimizer.consolidate_state_dict(to=1)
        found[str(view)] = state(model)
        if td.get_rank() == 1:
            found[f"moments {view}"] = {
                index: entry["exp_avg"] for index, entry in optimizer.state_dict()["state"].items()
            }
    return found


@case
def ZeRO_join(folder: str) -> dict:
    model = DDP(branches())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.02)
    with Join([model, optimizer]):
        train(model, 2 + td.get_rank(), optimizer)
    return state(model)


@case
def PostLocalSGDOptimizer_and_averager(folder: str) -> dict:
    model = branches()
    optimizer = PostLocalSGDOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05),
        PeriodicModelAverager(period=2, warmup_steps=1),
    )
    train(model, 4, optimizer)
    return state(model)


@case
@at_least(4)
def hierarchical_averager(folder: str) -> dict:
    from collections import OrderedDict

    model = branches()
    averager = HierarchicalModelAverager(
        OrderedDict([(2, 2), (4, td.get_world_size())]), warmup_steps=0
    )
    optimizer = PostLocalSGDOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), averager)
    train(model, 4, optimizer)
    return state(model)


# --- pipelines -----------------------------------------------------------------------------------


def stages(count: int) -> list[nn.Module]:
    torch.manual_seed(6)
    return [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(count)]


def pipeline(name: str) -> dict:
    from torch.distributed import pipelining
    from torch.distributed.pipelining import PipelineStage

    rank, size = td.get_rank(), td.get_world_size()
    several = name.startswith("Interleaved")
    each = 2 if several else 1
    modules = stages(size * each)
    mine = [
        PipelineStage(modules[i], i, size * each, torch.device("cpu"))
        for i in range(rank, size * each, size)
    ]

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (output - target).square().mean()

    kind = getattr(pipelining, f"Schedule{name}")
    schedule = kind(mine if several else mine[0], n_microbatches=2 * size, loss_fn=loss)
    torch.manual_seed(9)
    data, target = torch.randn(4 * size, 8), torch.randn(4 * size, 8)
    losses: list = []
    for _ in range(2):
        arguments = (data,) if rank == 0 else ()
        last = {"target": target, "losses": losses} if rank == size - 1 else {}
        schedule.step(*arguments, **last)
    gradients = [p.grad.clone() for stage in mine for p in stage.submod.parameters()]
    return {"gradients": gradients, "losses": [one.detach() for one in losses]}


@case
def pipeline_GPipe(folder: str) -> dict:
    return pipeline("GPipe")


@case
def pipeline_1F1B(folder: str) -> dict:
    return pipeline("1F1B")


@case
def pipeline_interleaved(folder: str) -> dict:
    return pipeline("Interleaved1F1B")
