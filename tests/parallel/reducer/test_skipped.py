"""skip_all_reduce_unused_params where the ranks do not leave out the same parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ddp_cases import DDP
from torch import nn

import hpcdist as dist
from hpcdist.parallel import comm_hooks as hooks
from hpcdist.testing import parallel_assert, parallel_raises

pytestmark = [pytest.mark.ranks, pytest.mark.mpi(min_size=2)]


def waiting(_state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A hook of a user's, which waits for the average at once."""
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    dist.all_reduce(bucket.buffer(), op=dist.ReduceOp.AVG)
    future.set_result(bucket.buffer())
    return future


HOOKS = [hooks.allreduce_hook, waiting]


class Either(nn.Module):
    """Two parameters of one size, of which a call uses one, or none."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(count)), nn.Parameter(torch.ones(count))

    def forward(self, first: bool | None) -> torch.Tensor:
        if first is None:
            return torch.ones((), requires_grad=True) * 1
        return (2 * self.a).sum() if first else (10 * self.b).sum()


class Some(nn.Module):
    """Three parameters, of which a call uses some."""

    def __init__(self) -> None:
        super().__init__()
        self.each = nn.ParameterList(nn.Parameter(torch.ones(3)) for _ in range(3))

    def forward(self, used: tuple[int, ...]) -> torch.Tensor:
        return torch.stack([self.each[place].sum() for place in used]).sum()


def make(cap: float | None, as_view: bool, count: int = 3) -> DDP:
    model = DDP(
        Either(count),
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


@pytest.mark.parametrize("used", [(0, 2), (0,)], ids=str)
@pytest.mark.parametrize("swapped", [False, True], ids=["few", "many"])
def test_the_group_is_in_step_after_different_numbers(used: tuple[int, ...], swapped: bool) -> None:
    """Those who reduced more buckets waited for the others until their timeout."""
    model = DDP(
        Some(),
        find_unused_parameters=True,
        skip_all_reduce_unused_params=True,
        bucket_cap_mb=1e-6,
    )
    with parallel_raises(dist.DistMismatchError):
        model((0, 1, 2) if swapped == (dist.get_rank() == 0) else used).backward()
    total = torch.ones(1)
    dist.all_reduce(total)
    parallel_assert(total.item() == dist.get_world_size(), f"{total}")


@pytest.mark.parametrize("count", [3, 1 << 19], ids=["short", "long"])
def test_the_error_tells_that_parameters_are_left_out(count: int) -> None:
    """That of a gradient which is averaged where it lies did not."""
    model = make(1e-6, False, count)
    with parallel_raises(dist.DistMismatchError, match="with skip_all_reduce_unused_params"):
        model(dist.get_rank() == 0).backward()


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("passes", [0, 2], ids=["in the first pass", "later"])
@pytest.mark.parametrize("cap", [1e-6, None], ids=["a bucket each", "one bucket"])
@pytest.mark.parametrize("others", [False, None], ids=["another one", "none"])
def test_ranks_that_use_different_ones_with_a_hook(
    others: bool | None, cap: float | None, passes: int, hook: Any
) -> None:
    """Each averaged its own with another one of the others, and all took that for the average."""
    model = make(cap, False)
    model.register_comm_hook(None, hook)
    for _ in range(passes):
        model(True).backward()
    with parallel_raises(dist.DistMismatchError):
        model(True if dist.get_rank() == 0 else others).backward()


@pytest.mark.parametrize("hook", [None, *HOOKS])
@pytest.mark.parametrize("cap", [1e-6, None], ids=["a bucket each", "one bucket"])
def test_ranks_that_use_the_same_one_in_turn(cap: float | None, hook: Any) -> None:
    model = make(cap, False)
    if hook is not None:
        model.register_comm_hook(None, hook)
    for first, value in ((True, 2.0), (False, 10.0), (None, 0.0), (True, 2.0)):
        model.zero_grad()
        model(first).backward()
        parameters = [model.module.a, model.module.b]
        if first is not None:
            used = parameters.pop(0 if first else 1).grad
            parallel_assert(used is not None and bool((used == value).all()), f"{used}")
        for unused in parameters:
            parallel_assert(unused.grad is None, f"{unused.grad}")
    dist.barrier()
