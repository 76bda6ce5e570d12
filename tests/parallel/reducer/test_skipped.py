"""skip_all_reduce_unused_params where the ranks do not leave out the same parameters."""

from __future__ import annotations

import pytest
import torch
from ddp_cases import DDP
from torch import nn

import hpcdist as dist
from hpcdist.testing import parallel_assert, parallel_raises

pytestmark = [pytest.mark.ranks, pytest.mark.mpi(min_size=2)]


class Either(nn.Module):
    """Two parameters of one size, of which a call uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))

    def forward(self, first: bool) -> torch.Tensor:
        return (2 * self.a).sum() if first else (10 * self.b).sum()


def make(cap: float | None, as_view: bool) -> DDP:
    model = DDP(
        Either(),
        find_unused_parameters=True,
        skip_all_reduce_unused_params=True,
        bucket_cap_mb=cap,
        gradient_as_bucket_view=as_view,
    )
    buckets = [bucket.members for bucket in model.reducer.buckets]
    parallel_assert(len(buckets) == (1 if cap is None else 2), str(buckets))
    return model


@pytest.mark.parametrize("as_view", [False, True], ids=["copies", "views"])
@pytest.mark.parametrize("cap", [1e-6, None], ids=["a bucket each", "one bucket"])
def test_ranks_that_use_different_ones(cap: float | None, as_view: bool) -> None:
    """Rank 0 averaged its parameter with another one of the others, or some got no gradient."""
    model = make(cap, as_view)
    with parallel_raises(dist.DistMismatchError):
        model(dist.get_rank() == 0).backward()


@pytest.mark.parametrize("cap", [1e-6, None], ids=["a bucket each", "one bucket"])
def test_ranks_that_use_the_same_one_in_turn(cap: float | None) -> None:
    model = make(cap, False)
    for first, value in ((True, 2.0), (False, 10.0), (True, 2.0)):
        model.zero_grad()
        model(first).backward()
        used, unused = (model.module.a, model.module.b)[:: 1 if first else -1]
        parallel_assert(used.grad is not None and bool((used.grad == value).all()), f"{used.grad}")
        parallel_assert(unused.grad is None, f"{unused.grad}")
