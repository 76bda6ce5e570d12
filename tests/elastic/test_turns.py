"""The loop over a rank's shares of a batch: what it averages, and what it refuses."""

from __future__ import annotations

import pytest
import torch

import hpcdist as dist
from hpcdist.elastic import State, elastic
from hpcdist.optim import ZeroRedundancyOptimizer
from hpcdist.parallel.comm_hooks import allreduce_hook
from hpcdist.testing import parallel_assert, parallel_raises

pytestmark = pytest.mark.ranks

DDP = dist.DistributedDataParallel


def linear() -> torch.nn.Linear:
    torch.manual_seed(1)
    return torch.nn.Linear(3, 2)


def with_shares(state: State, count: int) -> State:
    """As if the job had been started with so many ranks."""
    mine = range(dist.get_rank(), count, dist.get_world_size())
    state.looked = True
    state.batch.found = count, {share: state.batch._take() for share in mine}
    return state


def loss_of(model: torch.nn.Module, share: int) -> torch.Tensor:
    return (model(torch.full((2, 3), 1.0 + share)) ** 2).mean()


@pytest.mark.parametrize("count", [1, 3, 5])
def test_the_average_is_over_all_shares(count):
    """With fewer ranks, with more ranks, and as many as at the start."""
    module = linear()
    model = DDP(module)
    plain = linear()
    for share in range(count):
        (loss_of(plain, share) / count).backward()
    state = with_shares(State(model=model), count)
    for step in elastic(state, 2, keep_batch=True):
        with step:
            model.zero_grad()
            mine = []
            for share in step.shares():
                mine.append(share)
                loss_of(model, share).backward()
            parallel_assert(mine == state.batch.mine and step.share_count == count)
            torch.testing.assert_close(module.weight.grad, plain.weight.grad)
    with torch.no_grad():
        parallel_assert(model.require_backward_grad_sync)


class Views(torch.nn.Module):
    """Autograd gives both parameters views of one gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = torch.nn.Parameter(torch.zeros(1024, 1024))
        self.flat = torch.nn.Parameter(torch.zeros(1 << 20))  # a piece of what is sent at once

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * (self.rows.view(-1) + self.flat.view(-1))).sum()


def test_gradients_in_one_memory_are_averaged_each():
    module = Views()
    model = DDP(module)
    state = with_shares(State(model=model), 5)
    for step in elastic(state, 1, keep_batch=True):
        with step:
            for share in step.shares():
                model(torch.full((1 << 20,), 1.0 + share)).backward()
            found = [p.grad.unique().tolist() for p in module.parameters()]
            parallel_assert(found == [[3.0], [3.0]], f"{found}")
            parallel_assert(module.rows.grad.data_ptr() != module.flat.grad.data_ptr())


def test_models_may_have_parameters_in_common():
    module = linear()
    first, second = DDP(torch.nn.Sequential(module)), DDP(torch.nn.Sequential(module))
    state = with_shares(State(first=first, second=second), 5)
    for step in elastic(state, 1, keep_batch=True):
        with step:
            for share in step.shares():
                loss_of(first, share).backward()
            parallel_assert(bool(module.weight.grad.abs().sum()))


def test_without_keep_batch_a_rank_has_the_share_of_its_number():
    state = State(model=torch.nn.Linear(2, 2))
    for step in elastic(state, 1):
        with step:
            shares = list(step.shares())
            parallel_assert((shares, step.share_count)
                            == ([dist.get_rank()], dist.get_world_size()))  # fmt: skip


def test_values_that_change_outside_the_loop_change_for_all_shares():
    model = DDP(linear())
    state = with_shares(State(model=model), 5)
    mine = range(dist.get_rank(), 5, dist.get_world_size())
    state.values.gone, state.values.before, state.values.own = 1, 0, -1
    state.batch.found = 5, {share: state.batch._take() for share in mine}
    wrong = []
    for step in elastic(state, 3, keep_batch=True):
        with step:
            state.values.before = step.index
            if step.index == 1:
                del state.values.gone
            for share in step.shares():
                loss_of(model, share).backward()
                values = state.values
                seen = values.before, hasattr(values, "gone"), values.own
                if seen != (step.index, step.index == 0, share if step.index else -1):
                    wrong.append((step.index, share, seen))
                values.own = share
            state.values.after = [step.index]
    state.batch.spread()  # as the next step does, or a commit where a rank may die
    for share in state.batch.mine:
        state.batch.turn_to(share)
        if vars(state.values) != {"own": share, "before": 2, "after": [2]}:
            wrong.append((share, str(state.values)))
    parallel_assert(not wrong, f"{wrong}")


def left_out(step, model):
    pass


def broken_off(step, model):
    for _ in step.shares():
        break


def twice(step, model):
    for _ in (0, 1):
        for share in step.shares():
            loss_of(model, share).backward()


def nested(step, model):
    for share in step.shares():
        loss_of(model, share).backward()
        list(step.shares())


def inside_no_sync(step, model):
    with model.no_sync():
        list(step.shares())


@pytest.mark.parametrize("shares", [0, 5], ids=["one each", "several"])
@pytest.mark.parametrize(
    ("body", "says"),
    [
        (left_out, "iterates over step.shares()"),
        (broken_off, "ended before the last share"),
        (twice, "once, not nested"),
        (nested, "once, not nested"),
        (inside_no_sync, "accumulate gradients inside"),
    ],
)
def test_a_body_that_does_not_use_each_share_once_is_an_error(shares, body, says):
    model = DDP(linear())
    state = State(model=model)
    if shares:
        with_shares(state, shares)
    elif body is inside_no_sync:
        return  # DDP then does as it is told
    with parallel_raises(RuntimeError, match=says):
        for step in elastic(state, 1, keep_batch=True):
            with step:
                body(step, model)
    parallel_assert(model.require_backward_grad_sync)
    loss_of(model, 0).backward()  # goes on as always


def hooked() -> dict:
    model = DDP(linear())
    model.register_comm_hook(None, allreduce_hook)
    return {"model": model}


def manual() -> dict:
    model = DDP(linear())
    model.require_manual_backward_finalization = True
    return {"model": model}


def sparse() -> dict:
    return {"model": DDP(torch.nn.Embedding(4, 3, sparse=True))}


def in_turn_with_all() -> dict:
    norm = torch.nn.SyncBatchNorm.convert_sync_batchnorm(torch.nn.BatchNorm1d(3))
    return {"model": DDP(torch.nn.Sequential(torch.nn.Linear(3, 3), norm))}


def of_another_group() -> dict:
    return {"model": DDP(linear(), process_group=dist.new_group())}


def in_backward() -> dict:
    model = DDP(linear())
    zero = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.1
    )
    return {"model": model, "optimizer": zero}


def beside() -> dict:
    return {"model": DDP(linear()), "optimizer": torch.optim.SGD(linear().parameters(), lr=0.1)}


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: {"model": linear()}, "no DistributedDataParallel"),
        (hooked, "has a communication hook"),
        (manual, "ends backward by hand"),
        (sparse, "sparse gradients"),
        (in_turn_with_all, "SyncBatchNorm"),
        (of_another_group, "over another group"),
        (in_backward, "optimizer steps in backward"),
        (beside, "optimizer steps parameters of no DistributedDataParallel"),
    ],
)
def test_what_cannot_be_averaged_by_shares_is_refused_at_the_start(make, says):
    with parallel_raises(ValueError, match=f"keep_batch=True: .*{says}"):
        next(iter(elastic(State(**make()), 1, keep_batch=True)))


def test_modes_of_modules_are_rolled_back_each():
    """A death in a validation: the repeated step trained as one evaluates."""
    model = torch.nn.Sequential(torch.nn.Dropout(), torch.nn.BatchNorm1d(3))
    frozen = model[1].eval()
    state = State(model=model)
    state.committed = state._take()
    model.eval()
    state.rollback()
    parallel_assert((model.training, model[0].training, frozen.training) == (True, True, False))
    frozen.train()
    model[0].eval()
    state.rollback()
    parallel_assert((model.training, model[0].training, frozen.training) == (True, True, False))
