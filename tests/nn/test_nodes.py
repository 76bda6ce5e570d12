"""The collectives of backward, as the entry check sees them."""

from __future__ import annotations

import pytest
import torch

import hpcdist as dist
from hpcdist.nn import functional as F
from hpcdist.testing import parallel_assert, parallel_raises

pytestmark = [pytest.mark.ranks, pytest.mark.mpi(min_size=2)]


def pairs():
    """Name -> (a function, and a call of another rank with the very shapes of its backward)."""
    size = dist.get_world_size()
    one, whole = torch.ones(2), torch.ones(2 * size)

    def parts():
        return [torch.ones(2) for _ in range(size)]

    return {
        "all_reduce": (F.all_reduce, lambda: dist.all_reduce(one)),
        "broadcast": (lambda x: F.broadcast(x, 0), lambda: dist.reduce(one, 0)),
        "reduce": (lambda x: F.reduce(x, 0), lambda: dist.broadcast(one, 0)),
        "gather": (lambda x: F.gather(x, 0)[0], lambda: dist.scatter(one, None, 0)),
        "scatter": (lambda x: F.scatter([x] * size, 0), lambda: dist.gather(one, None, 0)),
        "all_gather": (
            lambda x: torch.stack(F.all_gather(x)), lambda: dist.reduce_scatter(one, parts())
        ),
        "all_gather_single": (
            lambda x: F.all_gather_single(torch.empty(2 * size), x),
            lambda: dist.reduce_scatter_single(one, whole),
        ),
        "reduce_scatter": (
            lambda x: F.reduce_scatter(torch.empty(2), [x * 1 for _ in range(size)]),
            lambda: dist.all_gather(parts(), one),
        ),
        "reduce_scatter_single": (
            lambda x: F.reduce_scatter_single(torch.empty(2), x.repeat(size)),
            lambda: dist.all_gather_single(whole, one),
        ),
        "all_to_all": (
            lambda x: torch.stack(F.all_to_all(parts(), [x * 1 for _ in range(size)])),
            lambda: dist.all_to_all(parts(), parts()),
        ),
        "all_to_all_single": (
            lambda x: F.all_to_all_single(torch.empty(2 * size), x.repeat(size)),
            lambda: dist.all_to_all_single(whole, torch.ones(2 * size)),
        ),
    }  # fmt: skip


@pytest.mark.parametrize("name", [
    "all_reduce", "broadcast", "reduce", "gather", "scatter", "all_gather", "all_gather_single",
    "reduce_scatter", "reduce_scatter_single", "all_to_all", "all_to_all_single",
])  # fmt: skip
def test_backward_on_some_ranks_alone_meets_no_other_collective(name):
    forward, other = pairs()[name]
    x = torch.ones(2, requires_grad=True)
    result = forward(x).sum()
    with parallel_raises(dist.DistMismatchError, match="backward of"):
        if dist.get_rank() == 0:
            result.backward()
        else:
            other()
    result.backward()
    parallel_assert(x.grad is not None)
