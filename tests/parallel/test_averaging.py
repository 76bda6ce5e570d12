"""Averaging parameters periodically, and post-local SGD as a whole, against torch over gloo."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from gloo import gloo, gloo_world
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as their_hook
from torch.distributed.algorithms.model_averaging import averagers, hierarchical_model_averager
from torch.distributed.optim import PostLocalSGDOptimizer as TorchPostLocal

import hpcdist as dist
from hpcdist.groups import joining
from hpcdist.optim import PostLocalSGDOptimizer
from hpcdist.parallel import averaging, comm_hooks
from hpcdist.testing import parallel_assert, parallel_raises

pytestmark = [pytest.mark.ranks, pytest.mark.filterwarnings("ignore:.*period.*1")]


def drift(averager, steps):
    """Values of one parameter that each rank moves by its own amount before every average."""
    torch.manual_seed(0)
    used, unused = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1))
    with torch.no_grad():
        unused.fill_(float(dist.get_rank()))
    used.grad = torch.ones(2)
    seen = []
    for step in range(steps):
        with torch.no_grad():
            used.add_((dist.get_rank() + 1) * (step + 1))
        averager.average_parameters([used, unused])
        seen.append(used.detach().clone())
    parallel_assert(unused.item() == dist.get_rank(), "no gradient, no average")
    return torch.stack(seen)


def test_periodic_same_as_torch():
    gloo_world()
    for period, warmup in ((1, 0), (3, 0), (2, 3)):
        mine = drift(averaging.PeriodicModelAverager(period, warmup), 8)
        theirs = drift(averagers.PeriodicModelAverager(period, warmup), 8)
        parallel_assert(torch.allclose(mine, theirs), lambda m=mine, t=theirs: f"{m}\n{t}")


@pytest.mark.mpi(min_size=4)  # the only number of ranks in CI that has two levels
def test_hierarchical_same_as_torch():
    gloo_world()
    levels = OrderedDict([(2, 2), (4, dist.get_world_size())])
    their = hierarchical_model_averager.HierarchicalModelAverager(levels, warmup_steps=1)
    mine = drift(averaging.HierarchicalModelAverager(levels, warmup_steps=1), 9)
    parallel_assert(torch.allclose(mine, drift(their, 9)), lambda: f"{mine}")


def test_hierarchical_with_one_level_is_periodic():
    size = dist.get_world_size()
    one = drift(averaging.HierarchicalModelAverager({3: size}), 7)
    other = drift(averaging.PeriodicModelAverager(3), 7)
    parallel_assert(torch.equal(one, other))


def test_parameters_keep_their_memory_and_dtypes():
    me, size = dist.get_rank(), dist.get_world_size()
    parameters = [
        nn.Parameter(torch.full((2, 3), float(me), dtype=dtype))
        for dtype in (torch.float32, torch.float64)
    ]
    where = [p.data_ptr() for p in parameters]
    groups = [{"params": [p]} for p in parameters]
    averaging.average_parameters_or_parameter_groups(groups)
    parallel_assert(all(p.eq(me).all() for p in parameters), "none has a gradient")
    for p in parameters:
        p.grad = torch.zeros_like(p)
    averaging.average_parameters_or_parameter_groups(groups)
    parallel_assert(all(p.eq((size - 1) / 2).all() for p in parameters))
    parallel_assert([p.data_ptr() for p in parameters] == where)


def test_post_local_sgd_same_as_torch(rng):
    gloo_world()
    size, me = dist.get_world_size(), dist.get_rank()
    x = torch.from_numpy(rng.standard_normal((9, size, 4, 6))).float()
    y = torch.from_numpy(rng.standard_normal((9, size, 4, 1))).float()
    each = 2 if size % 2 == 0 else 1
    mine, groups = dist.new_subgroups(group_size=each)
    theirs, _ = gloo.new_subgroups(group_size=each)

    def run(wrap, hooks, subgroup, averager, optimizer_class):
        torch.manual_seed(4)
        model = wrap(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)))
        state = hooks.PostLocalSGDState(None, subgroup, 3)
        model.register_comm_hook(state, hooks.post_localSGD_hook)
        local = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
        optimizer = optimizer_class(local, averager(period=2, warmup_steps=3))
        for step in range(9):
            optimizer.zero_grad()
            (model(x[step, me]) - y[step, me]).square().mean().backward()
            optimizer.step()
        return torch.cat([p.detach().flatten() for p in model.parameters()]), optimizer

    found, optimizer = run(
        dist.DistributedDataParallel,
        comm_hooks,
        mine,
        averaging.PeriodicModelAverager,
        PostLocalSGDOptimizer,
    )
    wanted, torchs = run(
        nn.parallel.DistributedDataParallel,
        their_hook,
        theirs,
        averagers.PeriodicModelAverager,
        TorchPostLocal,
    )
    parallel_assert((found - wanted).abs().max() <= 1e-6, lambda: f"{found - wanted}")
    state = optimizer.state_dict()
    parallel_assert(state["step"] == torchs.state_dict()["step"] == 9)
    optimizer.averager.step = 0
    optimizer.load_state_dict(state)
    parallel_assert(optimizer.averager.step == 9)
    with pytest.warns(UserWarning, match="begin at 0"):
        optimizer.load_state_dict(optimizer.optim.state_dict())
    parallel_assert(optimizer.averager.step == 0)
    for group in groups:
        if group is mine:
            dist.destroy_process_group(group)


def test_wrong_use():
    size = dist.get_world_size()
    with parallel_raises(ValueError, match="period must be 1"):
        averaging.PeriodicModelAverager(0)
    with parallel_raises(ValueError, match="warmup_steps"):
        averaging.PeriodicModelAverager(2, -1)
    with parallel_raises(ValueError, match="must not be empty"):
        averaging.HierarchicalModelAverager({})
    with parallel_raises(ValueError, match="but the group has"):
        averaging.HierarchicalModelAverager({2: size + 1})
    with parallel_raises(ValueError, match="must grow"):
        averaging.HierarchicalModelAverager({4: 1, 2: size})
    for wrong in (None, "1", 1.5):
        with parallel_raises(TypeError, match="^period must be a whole number"):
            averaging.PeriodicModelAverager(wrong)
        with parallel_raises(TypeError, match="^warmup_steps must be a whole number"):
            averaging.PeriodicModelAverager(2, wrong)
        with parallel_raises(TypeError, match="^a period must be a whole number"):
            averaging.HierarchicalModelAverager({wrong: size})
        with parallel_raises(TypeError, match="^the size of period 2 must be a whole number"):
            averaging.HierarchicalModelAverager({2: wrong})
    with parallel_raises(TypeError, match="not int"):
        averaging.get_params_to_average([1])
    if size > 1:
        odd = dist.get_rank() == size - 1
        with parallel_raises(dist.DistMismatchError, match="'period' with value 3"):
            averaging.PeriodicModelAverager(3 if odd else 2)
        with parallel_raises(dist.DistMismatchError, match="'warmup_steps'"):
            averaging.HierarchicalModelAverager({2: size}, 3 if odd else 0)


def test_dtypes():
    size = dist.get_world_size()
    for dtype in (torch.complex64, torch.complex128, torch.float64, torch.bfloat16):
        one = 1 + 2j if dtype.is_complex else 1
        parameter = nn.Parameter((torch.full((3,), dist.get_rank()) * one).to(dtype))
        averaging.average_parameters([parameter])
        parallel_assert(parameter.tolist() == [(size - 1) / 2 * one] * 3)
    if size > 1:
        for dtype in (torch.int64, torch.bool):
            counts = nn.Parameter(torch.ones(2).to(dtype), requires_grad=False)
            with parallel_raises(TypeError, match=f"not {dtype}"):
                averaging.average_parameters([nn.Parameter(torch.ones(1)), counts])


@pytest.mark.mpi(min_size=2)
def test_other_parameters_are_not_averaged_with_each_other():
    """Their values travel as one tensor, which had as many elements on every rank."""
    odd = dist.get_rank() == dist.get_world_size() - 1

    def towers(use):
        both = [nn.Parameter(torch.full((2,), float(i))) for i in (1, 3)]
        for number in use:
            both[number].grad = torch.zeros(2)
        return both

    def refused(parameters, average=averaging.average_parameters_or_parameter_groups):
        with parallel_raises(dist.DistMismatchError, match="digest is that of the step"):
            average(parameters)

    own = towers([1 if odd else 0])
    refused(own)
    parallel_assert([p[0].item() for p in own] == [1, 3])
    refused([{"params": towers([1] if odd else [0])}])
    refused(towers([] if odd else [0]))
    refused([] if odd else towers([0, 1]))
    shapes = [nn.Parameter(torch.ones(shape)) for shape in ((3, 2), (2, 3))]
    refused([shapes[odd]], averaging.average_parameters)
    halves = [nn.Parameter(torch.ones(2, dtype=torch.float16)), *towers([])]
    refused(halves[odd:], averaging.average_parameters)
    late = averaging.PeriodicModelAverager(2)
    late.step = 2 * odd
    refused(towers([0]), late.average_parameters)
    with parallel_raises(TypeError if odd else dist.DistMismatchError, match="not int"):
        averaging.average_parameters_or_parameter_groups([1] if odd else towers([0]))
    same = towers([0])
    averaging.average_parameters(p for p in same)
    parallel_assert([p[0].item() for p in same] == [1, 3])


@pytest.mark.mpi(min_size=2)
def test_a_rank_without_gradients_is_not_a_step_behind():
    """It made no call: the others averaged with what it had a period later."""
    me, parameter = dist.get_rank(), nn.Parameter(torch.zeros(2))
    averager = averaging.PeriodicModelAverager(2)
    errors = []
    for step in range(4):
        parameter.grad = torch.zeros(2) if me or step else None
        try:
            averager.average_parameters([parameter])
        except dist.DistMismatchError:
            errors.append(step)
            averager.step += 1
    parallel_assert(errors == [0], lambda: f"{errors}")


@pytest.mark.parametrize(
    "make",
    [
        lambda: averaging.PeriodicModelAverager(4),
        lambda: averaging.HierarchicalModelAverager(OrderedDict({4: dist.get_world_size()})),
    ],
)
def test_a_former_spare_makes_one_without_the_others(make, monkeypatch):
    """They wait for its State: a call that none of them makes would be refused."""
    monkeypatch.setattr(joining, "is_closed", lambda group: group is dist.group.WORLD)
    before = dist.group.WORLD.carrier.native.seq
    make()
    parallel_assert(dist.group.WORLD.carrier.native.seq == before)
