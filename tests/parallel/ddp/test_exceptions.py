"""Exceptions that end backward before the first gradient, behind the last, or beside sparse."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from ddp_cases import DDP, Boom, boom_if, explode
from torch import nn
from torch.utils.checkpoint import checkpoint

import hpcdist as dist
from hpcdist.parallel import SyncBatchNorm
from hpcdist.parallel import comm_hooks as hooks
from hpcdist.testing import parallel_assert, parallel_raises

pytestmark = pytest.mark.ranks


def last() -> bool:
    return dist.get_rank() == dist.get_world_size() - 1


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("everywhere", [False, True], ids=["one rank", "all ranks"])
@pytest.mark.parametrize(
    "options",
    [
        {"find_unused_parameters": True},
        {"find_unused_parameters": True, "skip_all_reduce_unused_params": True},
        {},
    ],
    ids=["find_unused", "skip_unused", "large bucket"],
)
def test_an_exception_behind_the_last_gradient(options: dict, everywhere: bool) -> None:
    """The other ranks have their averages by then, and step."""
    model = DDP(nn.Sequential(nn.Linear(512, 4 if options else 300)), **options)
    x = torch.ones(2, 512, requires_grad=True)
    raises = everywhere or last()
    model(x).sum().backward()  # the buckets are rebuilt after the first pass
    for _ in range(2 if everywhere else 1):
        behind = x * 1.0
        behind.register_hook(explode if raises else lambda grad: grad)
        loss = model(behind).sum()
        with boom_if(raises):
            loss.backward()
    model.zero_grad()
    loss = model(x).sum()
    if everywhere:
        loss.backward()
        grad = model.module[0].weight.grad
        parallel_assert(torch.equal(grad, torch.full_like(grad, 2.0)))
        return
    with parallel_raises(dist.DistMismatchError, match="after a backward that an exception ended"):
        loss.backward()
    with parallel_raises(dist.DistError, match="an earlier backward pass failed"):
        model(x)


class Rows(nn.Module):
    """Two tables with sparse gradients around a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.other = (nn.Embedding(5, 3, sparse=True) for _ in range(2))
        self.end = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor, more: torch.Tensor) -> torch.Tensor:
        return self.end(self.table(x) + self.other(x) + more).sum()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("where", ["table", "end", "behind"])
def test_an_exception_beside_sparse_gradients_is_heard_at_once(where: str) -> None:
    """Their rows are exchanged at the end of backward, where the other ranks would wait."""
    model, x = DDP(Rows(), bucket_cap_mb=0), torch.tensor([1, 2, dist.get_rank() % 5])
    start = torch.ones(3, requires_grad=True)
    more = start * 1.0
    at = more if where == "behind" else getattr(model.module, where).weight
    loss = model(x, more)
    at.register_hook(explode if last() else lambda grad: grad)
    dist.barrier()
    began = time.monotonic()
    with pytest.raises(Boom if last() else dist.DistMismatchError):
        loss.backward()
    took = time.monotonic() - began
    for _ in range(3):
        total = torch.ones(1)
        dist.all_reduce(total)
        parallel_assert(float(total) == dist.get_world_size(), f"{total}")
    parallel_assert(took < 5, f"{took:.1f} s")
    with parallel_raises(dist.DistError, match="an earlier backward pass failed"):
        model(x, start)
    again = DDP(Rows())
    again(x, start).backward()
    parallel_assert(again.module.table.weight.grad.is_sparse)


class Two(nn.Module):
    """Two layers, each in an activation checkpoint that runs a backward of its own, if asked to."""

    def __init__(self, reentrant: bool = False) -> None:
        super().__init__()
        self.first, self.end, self.reentrant = nn.Linear(3, 3), nn.Linear(3, 2), reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (self.first, self.end):
            x = checkpoint(layer, x, use_reentrant=True) if self.reentrant else layer(x)
        return x


def wrapped(kind: str) -> DDP:
    net = Two(reentrant=kind == "checkpoints")
    options: dict[str, Any] = {"bucket_cap_mb": 0, "find_unused_parameters": kind == "find_unused"}
    if kind == "delayed":
        options["delay_all_reduce_named_params"] = [("first.bias", net.first.bias)]
        options["param_to_hook_all_reduce"] = net.first.bias
    model = DDP(net, **options)
    if kind == "hook":
        model.register_comm_hook(None, hooks.allreduce_hook)
    return model


KINDS = ["plain", "find_unused", "hook", "delayed", "checkpoints", "inputs"]


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("kind", KINDS)
def test_an_exception_before_the_first_gradient_is_heard_at_once(kind: str) -> None:
    """Also where the rank that caught it goes on with something else than a forward."""
    model, x = wrapped(kind), torch.ones(2, 3, requires_grad=True)
    model(x).sum().backward()
    model.zero_grad()
    out = model(x)
    out.register_hook(explode if last() else lambda grad: grad)
    inputs = list(model.parameters()) if kind == "inputs" else None
    dist.barrier()
    began = time.monotonic()
    with pytest.raises(Boom if last() else dist.DistMismatchError):
        out.sum().backward(inputs=inputs)
    took = time.monotonic() - began
    for _ in range(3):
        total = torch.ones(1)
        dist.all_reduce(total)
        parallel_assert(float(total) == dist.get_world_size(), f"{total}")
    parallel_assert(took < 5, f"{took:.1f} s")
    with parallel_raises(dist.DistError, match="an earlier backward pass failed"):
        model(x)
    DDP(model.module)(x).sum().backward()


@pytest.mark.parametrize("kind", KINDS)
def test_all_ranks_may_begin_a_backward_again(kind: str) -> None:
    """That of the same forward, which an exception ended before the first gradient."""
    model = wrapped(kind)
    x = torch.full((2, 3), dist.get_rank() + 1.0, requires_grad=True)
    inputs = list(model.parameters()) if kind == "inputs" else None
    for _ in range(2):
        model.zero_grad()
        loss = (out := model(x)).sum()
        handle = out.register_hook(explode)
        with parallel_raises(Boom):
            loss.backward(inputs=inputs, retain_graph=True)
        handle.remove()
        loss.backward(inputs=inputs)
        grad = model.module.first.weight.grad
        mean = (dist.get_world_size() + 1) / 2  # of the inputs, each in two rows
        each = 2 * mean * model.module.end.weight.sum(0)
        parallel_assert(torch.allclose(grad, each[:, None].expand(3, 3)), f"{grad} {each}")


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("kind", KINDS[:4])
def test_an_exception_in_autograd_grad_on_one_rank_concerns_no_other(kind: str) -> None:
    """No gradient is averaged in it, so no rank waits for this one."""
    model, x = wrapped(kind), torch.ones(2, 3, requires_grad=True)
    model(x).sum().backward()
    for at in (x, model.module.end.bias):
        behind = x * 1.0
        loss = model(behind).sum()
        behind.register_hook(explode if last() else lambda grad: grad)
        with boom_if(last()):
            torch.autograd.grad(loss, [x, at])
    for _ in range(2):
        model.zero_grad()
        model(x).sum().backward()
        grad = model.module.end.bias.grad
        parallel_assert(torch.equal(grad, torch.full_like(grad, 2.0)))


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("cap", [0, None], ids=["buckets", "one bucket"])
@pytest.mark.parametrize("where", ["output", "4", "2", "0"])
@pytest.mark.parametrize("kind", ["plain", "find_unused", "hook"])
def test_an_exception_before_a_layers_call_leaves_the_ranks_in_step(
    kind: str, where: str, cap: float | None
) -> None:
    """Between the buckets the other ranks come to the layer's call, and fail there."""
    net = nn.Sequential(
        nn.Linear(3, 3), SyncBatchNorm(3), nn.Linear(3, 3), SyncBatchNorm(3), nn.Linear(3, 2)
    )
    model = DDP(net, bucket_cap_mb=cap, find_unused_parameters=kind == "find_unused")
    if kind == "hook":
        model.register_comm_hook(None, hooks.allreduce_hook)
    x = torch.ones(2, 3)
    model(x).sum().backward()
    out = model(x)
    at = out if where == "output" else net[int(where)].bias
    handle = at.register_hook(explode if last() else lambda grad: grad)
    dist.barrier()
    began = time.monotonic()
    with pytest.raises(Boom if last() else dist.DistMismatchError):
        out.sum().backward()
    handle.remove()
    took = time.monotonic() - began
    for _ in range(3):
        total = torch.ones(1)
        dist.all_reduce(total)
        parallel_assert(float(total) == dist.get_world_size(), f"{total}")
    parallel_assert(took < 5, f"{took:.1f} s")
    with parallel_raises(dist.DistError, match="an earlier backward pass failed"):
        model(x)
    DDP(net)(x).sum().backward()
