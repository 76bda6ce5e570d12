"""Exceptions that end backward late: behind the last gradient, or beside sparse ones."""

from __future__ import annotations

import time

import pytest
import torch
from ddp_cases import DDP
from torch import nn

import hpcdist as dist
from hpcdist.testing import parallel_assert, parallel_raises

pytestmark = pytest.mark.ranks


class Boom(Exception):
    pass


def explode(_gradient: torch.Tensor) -> None:
    raise Boom


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
        if raises:
            with pytest.raises(Boom):
                loss.backward()
        else:
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
