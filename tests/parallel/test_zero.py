"""ZeroRedundancyOptimizer: against the optimizer it divides, and torch's over gloo."""

from __future__ import annotations

import copy
import pickle
import time

import pytest
import torch
from gloo import gloo_world
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero

import hpcdist as dist
from hpcdist.optim import ZeroRedundancyOptimizer
from hpcdist.parallel import Join, comm_hooks
from hpcdist.testing import parallel_assert, parallel_raises

pytestmark = pytest.mark.ranks

DDP = dist.DistributedDataParallel
STEPS = 5


def network(dtype=torch.float32) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(108, 20), nn.Tanh(), nn.Linear(20, 5)
    ).to(dtype)


def batches(rng, steps=STEPS, dtype=torch.float32):
    size, me = dist.get_world_size(), dist.get_rank()
    x = torch.from_numpy(rng.standard_normal((steps, size, 4, 1, 8, 8))).to(dtype)
    y = torch.from_numpy(rng.integers(0, 5, (steps, size, 4)))
    return [(x[i, me], y[i, me]) for i in range(steps)]


def train(model, optimizer, data, scheduler=None):
    for x, y in data:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return [p.detach().clone() for p in model.parameters()]


def off(left, right):
    return max((a - b).abs().max().item() for a, b in zip(left, right, strict=True))


def groups(model):
    """Two groups with different options."""
    parameters = list(model.parameters())
    return [{"params": parameters[:2], "lr": 0.02}, {"params": parameters[2:]}]


@pytest.mark.parametrize("as_view", [False, True], ids=["packed", "views"])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_same_as_the_undivided_optimizer_and_as_torch(rng, kind, as_view):
    gloo_world()
    options = {"lr": 0.01, "weight_decay": 0.01}
    if kind is torch.optim.SGD:
        options["momentum"] = 0.9
    else:  # gloo adds in another order: what is left of a gradient near 0 must not become a step
        options["eps"] = 1e-3
    data = batches(rng)

    def run(wrap, make):
        model = wrap(network())
        optimizer = make(model)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return train(model, optimizer, data, schedule), optimizer

    plain, undivided = run(DDP, lambda m: kind(groups(m), **options))
    mine, zero = run(
        DDP,
        lambda m: ZeroRedundancyOptimizer(
            groups(m), kind, parameters_as_bucket_view=as_view, **options
        ),
    )
    theirs, torchs = run(
        nn.parallel.DistributedDataParallel,
        lambda m: TorchZero(groups(m), kind, parameters_as_bucket_view=as_view, **options),
    )
    parallel_assert(off(mine, plain) == 0, lambda: f"off by {off(mine, plain)}")
    bound = 1e-6 if kind is torch.optim.SGD else 1e-5
    parallel_assert(off(mine, theirs) <= bound, lambda: f"off by {off(mine, theirs)}")
    # Each rank keeps its share of the state only, the same share as torch's.
    parallel_assert(len(zero.optim.state) == len(torchs.optim.state))
    size = dist.get_world_size()
    parallel_assert(size == 1 or len(zero.optim.state) < len(undivided.state))
    parallel_assert(zero.param_groups[0]["lr"] == undivided.param_groups[0]["lr"] != 0.02)


@pytest.mark.parametrize("to", [0, -1])
def test_the_whole_state_is_that_of_the_undivided_optimizer(rng, to):
    to %= dist.get_world_size()
    data = batches(rng)
    wrapped = DDP(network())
    undivided = torch.optim.Adam(groups(wrapped), lr=0.01)
    train(wrapped, undivided, data[:3])
    model = DDP(network())
    zero = ZeroRedundancyOptimizer(groups(model), torch.optim.Adam, lr=0.01)
    train(model, zero, data[:3])
    with parallel_raises(RuntimeError, match="consolidate_state_dict"):
        zero.state_dict()
    zero.consolidate_state_dict(to)
    whole = [zero.state_dict() if dist.get_rank() == to else None]
    dist.broadcast_object_list(whole, src=to)
    wanted = undivided.state_dict()
    same = whole[0]["state"].keys() == wanted["state"].keys() and all(
        torch.equal(torch.as_tensor(v), torch.as_tensor(wanted["state"][i][name]))
        for i, state in whole[0]["state"].items()
        for name, v in state.items()
    )
    parallel_assert(same and whole[0]["param_groups"] == wanted["param_groups"])
    train(model, zero, data[:1])
    with parallel_raises(RuntimeError, match="after the last step"):
        zero.state_dict()
    # It goes on from there, in either direction.
    model.load_state_dict(wrapped.state_dict())
    resumed = ZeroRedundancyOptimizer(groups(model), torch.optim.Adam, lr=0.5)
    resumed.load_state_dict(copy.deepcopy(wanted))
    parallel_assert(off(train(model, resumed, data[3:]), train(wrapped, undivided, data[3:])) == 0)
    fresh = torch.optim.Adam(groups(model))
    fresh.load_state_dict(whole[0])
    with parallel_raises(ValueError, match="does not fit"):
        ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam).load_state_dict(wanted)


@pytest.mark.parametrize("interleaved", [False, True], ids=["after", "interleaved"])
def test_overlap_with_ddp(rng, interleaved):
    data = batches(rng)
    plain = DDP(network())
    wanted = train(plain, torch.optim.Adam(plain.parameters(), lr=0.01), data)
    wrap = (
        comm_hooks.hook_with_zero_step_interleaved
        if interleaved
        else comm_hooks.hook_with_zero_step
    )
    model = DDP(network(), bucket_cap_mb=0.001)
    zero = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.Adam, overlap_with_ddp=True, lr=0.01
    )
    with parallel_raises(RuntimeError, match="nothing steps this optimizer"):
        zero.step()
    hook = wrap(comm_hooks.allreduce_hook, model, zero)
    zero.step()  # before the first backward pass, as warm-ups do
    with model.no_sync():
        model(data[0][0]).sum().backward()
    with parallel_raises(RuntimeError, match="nothing steps this optimizer"):
        zero.step()  # the hook is not registered
    zero.zero_grad()
    model.register_comm_hook(None, hook)
    found = train(model, zero, data)
    parallel_assert(off(found, wanted) <= 1e-6, lambda: f"off by {off(found, wanted)}")
    zero.consolidate_state_dict()
    parallel_assert(dist.get_rank() or len(zero.state_dict()["state"]) == len(wanted))
    model(data[0][0]).sum().backward()  # also on a rank that has stepped none of the bucket itself
    with parallel_raises(RuntimeError, match="after the last step"):
        zero.state_dict()
    other = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam)
    with parallel_raises(ValueError, match="overlap_with_ddp=True"):
        wrap(comm_hooks.allreduce_hook, model, other)
    foreign = ZeroRedundancyOptimizer(
        network().parameters(), torch.optim.Adam, overlap_with_ddp=True
    )
    with parallel_raises(ValueError, match="not the DDP model's"):
        wrap(comm_hooks.allreduce_hook, model, foreign)


def test_parameters_keep_their_layout_and_may_have_several_dtypes(rng):
    model = nn.ModuleList(
        [nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last), nn.Linear(3, 3).double()]
    )
    before = [p.detach().clone() for p in model.parameters()]
    strides = [p.stride() for p in model.parameters()]
    for p in model.parameters():
        dist.broadcast(p.data, 0)
    zero = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.SGD, parameters_as_bucket_view=True, lr=1.0
    )
    parallel_assert([p.stride() for p in model.parameters()] == strides)
    start = [p.detach().clone() for p in model.parameters()]
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    late = nn.Parameter(torch.zeros(7))
    late.grad = torch.ones(7)
    zero.add_param_group({"params": [late], "lr": 0.5})
    zero.step()
    moved = off([p.detach() for p in model.parameters()], [s - 1 for s in start])
    parallel_assert(moved == 0 and late.eq(-0.5).all() and len(before) == len(start))


def test_a_closure_and_more_ranks_than_parameters(rng):
    parameter = nn.Parameter(torch.ones(3))
    zero = ZeroRedundancyOptimizer([parameter], torch.optim.SGD, lr=0.5)

    def closure():
        zero.zero_grad()
        loss = parameter.square().sum()
        loss.backward()
        return loss.item()

    parallel_assert(zero.step(closure) == 3.0 and parameter.eq(0).all())


@pytest.mark.mpi(min_size=2)
def test_join_with_uneven_inputs():
    """A rank that is done goes on stepping its share, or the others would stand still."""
    model = nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(1.0)
    zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=1.0)
    steps = 1 + 2 * dist.get_rank()
    with Join([zero]):
        for _ in range(steps):
            model.weight.grad = torch.full((1, 2), 0.25)
            zero.step()
    # Rank 0 owns the only parameter: it goes on stepping with its last gradient.
    longest = 1 + 2 * (dist.get_world_size() - 1)
    parallel_assert(model.weight.eq(1 - 0.25 * longest).all(), lambda: f"{model.weight}")


@pytest.mark.parametrize("accumulates", [False, True], ids=["each", "no_sync"])
@pytest.mark.parametrize("as_view", [False, True], ids=["packed", "views"])
@pytest.mark.mpi(min_size=2)
def test_join_of_ddp_and_zero_together(as_view, accumulates):
    """As DDP.join with the undivided optimizer."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    own = [torch.randn(3, 1, 8, 8, generator=generator) for _ in range(2 + 2 * dist.get_rank())]
    options = {"lr": 0.01, "momentum": 0.9}

    def run(make, block):
        model = DDP(network(), gradient_as_bucket_view=as_view)
        optimizer = make(model.parameters())
        with block([model, optimizer]):
            for x in own:
                optimizer.zero_grad()
                if accumulates:
                    with model.no_sync():
                        model(2 * x).square().mean().backward()
                    with torch.no_grad():
                        model(x)
                model(x).square().mean().backward()
                optimizer.step()
        return [p.detach().clone() for p in model.parameters()]

    def divided(parameters):
        return ZeroRedundancyOptimizer(
            parameters, torch.optim.SGD, parameters_as_bucket_view=as_view, **options
        )

    mine = run(divided, Join)
    whole = run(lambda p: torch.optim.SGD(p, **options), lambda both: both[0].join())
    parallel_assert(off(mine, whole) <= 1e-6, lambda: f"{off(mine, whole)} from the undivided")
    for parameter in mine:
        first = parameter.clone()
        dist.broadcast(first, 0)
        parallel_assert(torch.equal(first, parameter), "ranks differ")


def test_wrong_use():
    with parallel_raises(TypeError, match="not a tensor"):
        ZeroRedundancyOptimizer(torch.ones(1), torch.optim.SGD, lr=1.0)
    with parallel_raises(TypeError, match="not int"):
        ZeroRedundancyOptimizer(3, torch.optim.SGD, lr=1.0)
    with parallel_raises(ValueError, match="empty"):
        ZeroRedundancyOptimizer([], torch.optim.SGD, lr=1.0)
    one = nn.Parameter(torch.ones(1))
    with parallel_raises(TypeError, match="only"):
        ZeroRedundancyOptimizer([one, {"params": [one]}], torch.optim.SGD, lr=1.0)
    with parallel_raises(ValueError, match='key "params"'):
        ZeroRedundancyOptimizer([{"lr": 1.0}], torch.optim.SGD, lr=1.0)
    zero = ZeroRedundancyOptimizer([one], torch.optim.SGD, lr=1.0)
    for copies in (copy.deepcopy, copy.copy, pickle.dumps):
        with parallel_raises(TypeError, match="neither copied nor pickled"):
            copies(zero)


def odd_one(usual, odd):
    return odd if dist.get_rank() == dist.get_world_size() - 1 else usual


@pytest.mark.mpi(min_size=2)
def test_ranks_that_make_it_differently():
    """Also where each rank's share has as many elements as on the others."""

    def parameters(*sizes):
        return [nn.Parameter(torch.ones(size)) for size in sizes]

    sgd, adam = torch.optim.SGD, torch.optim.Adam
    doubles = nn.Parameter(torch.ones(4, dtype=torch.float64))
    cases = [
        (r"'0\.0' with shape", parameters(*odd_one((4, 5, 6), (5, 4, 6))), sgd, {"lr": 0.1}),
        ("dtype float", odd_one(parameters(4), [doubles]), sgd, {"lr": 0.1}),
        ("optimizer_class.*Adam", parameters(4, 5), odd_one(sgd, adam), {"lr": 0.1}),
        (r"'0\.lr' with value 0.[12]", parameters(4, 5), sgd, {"lr": odd_one(0.1, 0.2)}),
        (
            r"'0\.betas' with value \[0\.[89]",
            parameters(4),
            adam,
            {"betas": [odd_one(0.9, 0.8), 0.999]},
        ),
    ]
    for text, given, kind, options in cases:
        with parallel_raises(dist.DistMismatchError, match=text):
            ZeroRedundancyOptimizer(given, kind, **options)
    with parallel_raises(odd_one(dist.DistMismatchError, ValueError)):  # one has no leaf
        ZeroRedundancyOptimizer(odd_one(parameters(3), [parameters(3)[0] * 2]), sgd, lr=0.1)
    optimizer = ZeroRedundancyOptimizer(parameters(3), sgd, lr=0.1)
    with parallel_raises(dist.DistMismatchError, match=r"'0\.0' with shape"):
        optimizer.add_param_group({"params": parameters(odd_one(5, 6))})
    late = nn.Parameter(torch.ones(5))
    with parallel_raises(dist.DistMismatchError, match=r"'0\.lr' with value"):
        optimizer.add_param_group({"params": [late], "lr": odd_one(0.5, 0.25)})
    with parallel_raises(odd_one(dist.DistMismatchError, ValueError)):  # sparse on one rank
        sparse = torch.ones(2, 2).to_sparse()
        optimizer.add_param_group({"params": [odd_one(nn.Parameter(torch.ones(2, 2)), sparse)]})
    optimizer.add_param_group({"params": [late], "lr": 0.5})
    late.grad = torch.ones(5)
    optimizer.step()
    parallel_assert(len(optimizer.param_groups) == 2 and late.eq(0.5).all())


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("as_view", [False, True], ids=["packed", "views"])
def test_a_step_that_raises_on_one_rank_is_an_error_on_all(as_view):
    class Failing(torch.optim.SGD):
        def step(self, closure=None):
            if odd_one(False, broken):
                raise ArithmeticError("no step here")
            return super().step(closure)

    broken = True
    parameters = [nn.Parameter(torch.ones(n)) for n in (5, 4, 3)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer = ZeroRedundancyOptimizer(
        parameters, Failing, parameters_as_bucket_view=as_view, lr=0.5
    )
    with parallel_raises(odd_one(dist.DistError, ArithmeticError), match="no step here"):
        optimizer.step()
    dist.barrier()
    broken = False
    optimizer.step()
    same = [p.clone() for p in parameters]
    for tensor in same:
        dist.broadcast(tensor, 0)
    parallel_assert(all(map(torch.equal, same, parameters)), "ranks differ after a retry")


@pytest.mark.mpi(min_size=2)
def test_a_closure_that_raises_on_one_rank_behind_its_own_collectives():
    """These are no part of the exchange, in which the other ranks are by then."""
    parameters = [nn.Parameter(torch.ones(3)) for _ in range(2 * dist.get_world_size())]
    zero = ZeroRedundancyOptimizer(parameters, torch.optim.SGD, lr=0.5)
    for calls in (1, 20):

        def closure(calls=calls):
            for _ in range(calls):
                dist.all_reduce(torch.ones(1))
            assert odd_one(True, False), "loss is infinite"
            return 0.0

        began = time.monotonic()
        with parallel_raises(odd_one(dist.DistError, AssertionError), match="loss is infinite"):
            zero.step(closure)
        parallel_assert(time.monotonic() - began < 5)
    zero.step()
    dist.barrier()


class Far(torch.Tensor):
    """On another device, as it says."""

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", 0)

    def cpu(self) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)


def test_states_on_a_gpu_are_collected():
    """In ordinary memory, as the codec needs them."""
    parameters = [nn.Parameter(torch.ones(3)) for _ in range(4)]
    zero = ZeroRedundancyOptimizer(parameters, torch.optim.SGD, lr=0.5, momentum=0.9)
    for number, parameter in enumerate(parameters):
        if zero._owner[parameter] == dist.get_rank():
            state = torch.full((3,), float(number)).as_subclass(Far)
            zero.optim.state[parameter]["momentum_buffer"] = state
    zero.consolidate_state_dict()
    if dist.get_rank() == 0:
        found = {n: each["momentum_buffer"] for n, each in zero.state_dict()["state"].items()}
        same = all(torch.equal(value, torch.full((3,), float(n))) for n, value in found.items())
        assert len(found) == 4 and same


def test_shares_of_former_ranks(monkeypatch, rng):
    """After reconfigure() without reshard(): each way to use them raises."""
    model = DDP(network(), bucket_cap_mb=0.001)
    zero = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.01
    )
    hook = comm_hooks.hook_with_zero_step(comm_hooks.allreduce_hook, model, zero)
    model.register_comm_hook(None, hook)
    data = batches(rng, 3)
    train(model, zero, data[:1])
    monkeypatch.setattr(zero, "_generation", zero._generation - 1)
    with parallel_raises(dist.DistError, match="reshard"):
        zero.consolidate_state_dict()
    before = [p.detach().clone() for p in model.parameters()]
    with parallel_raises(dist.DistError, match="reshard"):
        train(model, zero, data[1:2])
    parallel_assert(off([p.detach() for p in model.parameters()], before) == 0)
    monkeypatch.undo()
    train(model, zero, data[2:])
    zero.consolidate_state_dict()
