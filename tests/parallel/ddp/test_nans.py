"""DistributedDataParallel with HPCDIST_NAN_CHECK: a step whose gradients are NaNs on one rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import hpcdist as dist
from hpcdist import _engine
from hpcdist.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from hpcdist.testing import parallel_assert, parallel_raises

pytestmark = pytest.mark.ranks

FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "views": {"gradient_as_bucket_view": True},
    "copies": {"gradient_as_bucket_view": False},
    "unused": {"find_unused_parameters": True},
    "static": {"static_graph": True},
}
STEPS, SKIPPED = 4, (0, 2)


@pytest.fixture(autouse=True)
def looking():
    """Look for NaNs on this rank, as with HPCDIST_NAN_CHECK=1."""
    _engine.look_for_nans(True)
    yield
    _engine.look_for_nans(False)


class Net(nn.Module):
    """Several buckets; the gradient of one parameter is spoilt where `spoilt` is set."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.body = nn.Sequential(*[nn.Linear(60, 60) for _ in range(4)])
        self.spoilt = False
        self.body[1].weight.register_hook(lambda g: g * float("nan") if self.spoilt else g)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


def batch(step: int, rank: int) -> torch.Tensor:
    """The input of a step, another on each rank."""
    made = torch.Generator().manual_seed(100 * step + rank)
    return torch.rand(8, 60, generator=made)


def trained(form: dict[str, Any], bad: int | None) -> list[torch.Tensor]:
    """Parameters after the steps but the skipped ones, in which rank `bad` has NaNs, if given."""
    rank, net = dist.get_rank(), Net()
    model = dist.DistributedDataParallel(net, bucket_cap_mb=0.02, **form)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        if step in SKIPPED and bad is None:
            continue
        optimizer.zero_grad()
        net.spoilt = rank == bad and step in SKIPPED
        loss = model(batch(step, rank)).square().mean()
        if step in SKIPPED:
            with parallel_raises(dist.DistNaNError, match="DistributedDataParallel") as raised:
                loss.backward()
            named = "contain NaNs: body.1.weight." in str(raised.value)
            parallel_assert(named == (rank == bad), str(raised.value))
            parallel_assert(raised.value.refusal.ranks == (bad,), str(raised.value.refusal))
        else:
            loss.backward()
            optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("form", FORMS)
def test_the_program_leaves_the_step_out_and_goes_on(form):
    """The parameters are then those of a run without these steps, bit for bit."""
    expected = trained(FORMS[form], None)
    for bad in {0, dist.get_world_size() - 1}:
        got = trained(FORMS[form], bad)
        parallel_assert(all(torch.equal(x, y) for x, y in zip(got, expected, strict=True)))


def test_with_a_hook_the_module_is_wrapped_again():
    """What a hook has changed on some ranks is not known."""
    net = Net()
    model = dist.DistributedDataParallel(net)
    model.register_comm_hook(None, allreduce_hook)
    net.spoilt = dist.get_rank() == 0
    loss = model(batch(0, dist.get_rank())).sum()
    with parallel_raises(dist.DistNaNError, match="allreduce_hook"):
        loss.backward()
    with parallel_raises(dist.DistError, match="wrap the module in a new"):
        model(batch(1, dist.get_rank()))
    model = dist.DistributedDataParallel(net)
    net.spoilt = False
    model.zero_grad()
    model(batch(1, dist.get_rank())).sum().backward()
    parallel_assert(all(bool(p.grad.isfinite().all()) for p in model.parameters()))


def test_broadcast_buffers_of_nans_are_refused_in_forward():
    norm = nn.BatchNorm1d(60)
    model = dist.DistributedDataParallel(nn.Sequential(nn.Linear(60, 60), norm))
    norm.running_mean[3] = float("nan") if dist.get_rank() == 0 else 0.0
    if dist.get_world_size() == 1:
        return
    with parallel_raises(dist.DistNaNError, match="NaN at element"):
        model(batch(0, dist.get_rank()))
    norm.running_mean.zero_()
    model(batch(0, dist.get_rank())).sum().backward()
