"""Features of DistributedDataParallel beside one process and torch over gloo, step by step."""

from __future__ import annotations

import copy
import gc
import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from ddp_cases import DDP, TorchDDP, distance, grads, mine, sgd, side_by_side
from gloo import gloo_world
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.utils.checkpoint import checkpoint

import hpcdist as dist
from hpcdist.parallel import comm_hooks
from hpcdist.testing import parallel_assert, parallel_raises

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.filterwarnings("ignore:find_unused_parameters=True was specified"),
]

BATCH = 24  # divides by 1, 2, 3 and 4 ranks


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(9)
        self.first, self.middle, self.last = nn.Linear(5, 7), nn.Linear(7, 7), nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))


def data(steps: int = 4) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(12)
    return [torch.randn(BATCH, 5, generator=generator) for _ in range(steps)]


def squares(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).float().square().mean()


# --- what is trained, and when its gradients move ------------------------------------------------


@pytest.mark.parametrize("as_view", [False, True], ids=["copies", "views"])
def test_frozen_layers_and_several_dtypes(as_view: bool) -> None:
    def build() -> nn.Module:
        net = Net()
        net.middle.double()
        net.middle.bias.requires_grad_(False)
        net.first.weight.requires_grad_(False)
        net.first.register_forward_hook(lambda _module, _args, out: out.double())
        net.middle.register_forward_hook(lambda _module, _args, out: out.float())
        return net

    side_by_side(build, squares, data(), gradient_as_bucket_view=as_view)


@pytest.mark.parametrize("names", [("last.weight",), ("last.bias", "middle.weight")], ids=str)
def test_delayed_parameters(names: tuple[str, ...]) -> None:
    def of_module(net: nn.Module) -> dict[str, Any]:
        chosen = [(n, p) for n, p in net.named_parameters() if n in names]
        return {
            "delay_all_reduce_named_params": chosen,
            "param_to_hook_all_reduce": net.first.weight,
        }

    # Torch's DDP does not wait for this all-reduce on the CPU, and steps with half of a sum.
    side_by_side(Net, squares, data(), of_module=of_module, torch_too=False)


def test_skipping_parameters_that_nobody_uses() -> None:
    class Part(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(torch.tanh(self.first(x)))

    model = side_by_side(
        Part,
        squares,
        data(),
        find_unused_parameters=True,
        skip_all_reduce_unused_params=True,
        bucket_cap_mb=0.0001,
    )
    parallel_assert(model.module.middle.weight.grad is None)


@dataclass
class Result:
    out: dict[str, tuple[torch.Tensor, ...]]
    note: str = "no tensor"


class Nested(Net):
    """Uses its middle layer for large inputs only, within a checkpoint, and returns a nest."""

    def forward(self, x: torch.Tensor) -> list[Any]:  # type: ignore[override]
        hidden = torch.tanh(self.first(x))
        if x.mean() > 0:
            hidden = checkpoint(self.middle, hidden, use_reentrant=False)
        return [Result({"out": (self.last(hidden),)}), None]


@pytest.mark.parametrize("cap", [None, 0.0001])
def test_a_layer_that_some_ranks_use_behind_outputs_in_a_nest(cap: float | None) -> None:
    side_by_side(
        Nested,
        lambda model, x: model(x)[0].out["out"][0].square().mean(),
        data(6),
        by_rank=True,
        find_unused_parameters=True,
        bucket_cap_mb=cap,
    )


def test_a_gradient_penalty() -> None:
    """The first derivative with respect to the input takes part in the loss."""

    def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        out = model(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return out.square().mean() + slope.square().mean()

    side_by_side(Net, loss_of, data())


def test_a_gradient_penalty_in_a_backward_of_its_own_stays_local() -> None:
    """It does not pass what forward returned, and torch's does not average it either."""
    gloo_world()
    models = [DDP(Net()), TorchDDP(Net())]
    for model in models:
        x = mine(data()[0]).clone().requires_grad_()
        out = model(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        out.square().mean().backward(retain_graph=True)
        slope.square().mean().backward()
    for ours, theirs in zip(*map(grads, models), strict=True):
        parallel_assert(torch.allclose(ours, theirs, atol=1e-6), f"{ours}, not {theirs}")


def test_two_models_that_train_each_other() -> None:
    """A generator and a critic; each step's backward reaches both, one optimizer steps."""
    gloo_world()

    def run(wrap: Callable[[nn.Module], nn.Module], take: Callable[[Any], Any]) -> Any:
        torch.manual_seed(3)
        makes, judges = wrap(nn.Linear(5, 5)), wrap(Net())
        optimizers = [sgd(makes.parameters()), sgd(judges.parameters())]
        losses = []
        for step, x in enumerate(data(6)):
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss = judges(makes(take(x))).square().mean() * (-1) ** step
            loss.backward()
            optimizers[step % 2].step()
            losses.append(loss.item())
        return torch.tensor(losses), [*makes.parameters(), *judges.parameters()]

    mean, ours = run(DDP, mine)
    theirs_mean, theirs = run(TorchDDP, mine)
    alone_mean, alone = run(lambda module: module, lambda x: x)
    parallel_assert(torch.allclose(mean, theirs_mean, atol=1e-6))
    dist.all_reduce(mean, dist.ReduceOp.AVG)
    parallel_assert(torch.allclose(mean, alone_mean, atol=1e-6))
    for other in (theirs, alone):
        pairs = zip(ours, other, strict=True)
        parallel_assert(all(torch.allclose(a, b, atol=1e-6) for a, b in pairs))


# --- precision ---------------------------------------------------------------------------------


@pytest.mark.parametrize("as_view", [False, True], ids=["copies", "views"])
def test_autocast(as_view: bool) -> None:
    def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(x)
        return out.float().square().mean()

    # One process takes each rank's part by itself: gradients are sums over a part in bfloat16.
    side_by_side(Net, loss_of, data(), by_rank=True, gradient_as_bucket_view=as_view)


# --- copies ------------------------------------------------------------------------------------


def pickled(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("how", [copy.deepcopy, pickled])
def test_copies_train_like_what_they_are_copies_of(how: Callable[[Any], Any]) -> None:
    side_by_side(Net, squares, data(), then=how, bucket_cap_mb=0.0001, static_graph=True)


def test_half_a_training_continues_in_torch() -> None:
    """Module, optimizer and state dict go over, and training goes on as if nothing had been."""
    gloo_world()
    whole, first = DDP(Net()), DDP(Net())
    optimizers = [sgd(whole.parameters()), sgd(first.parameters())]
    second = TorchDDP(Net())
    for step, x in enumerate(data(6)):
        if step == 3:
            second.load_state_dict(first.state_dict())
            kept = optimizers[1].state_dict()
            optimizers[1] = sgd(second.parameters())
            optimizers[1].load_state_dict(kept)
        for model, optimizer in zip(
            (whole, second if step >= 3 else first), optimizers, strict=True
        ):
            optimizer.zero_grad()
            squares(model, mine(x)).backward()
            optimizer.step()
    parallel_assert(distance(whole, second) <= 1e-6)


# --- hooks -------------------------------------------------------------------------------------


@pytest.mark.parametrize("as_view", [False, True], ids=["copies", "views"])
def test_a_hook_that_averages(as_view: bool) -> None:
    def then(model: Any) -> Any:
        hooks = comm_hooks if isinstance(model, DDP) else default_hooks
        model.register_comm_hook(None, hooks.allreduce_hook)
        return model

    side_by_side(
        Net, squares, data(), then=then, bucket_cap_mb=0.0001, gradient_as_bucket_view=as_view
    )


@pytest.mark.parametrize("as_view", [False, True], ids=["copies", "views"])
@pytest.mark.parametrize("kind", ["hook", "attached by torch"])
def test_an_optimizer_in_backward(kind: str, as_view: bool) -> None:
    """Torch's DDP needs a GPU for it; one process steps after backward."""
    gloo_world()
    net, alone = Net(), Net()
    options = {"lr": 0.05, "momentum": 0.9}
    trained = list(net.parameters())
    if kind == "attached by torch":
        _apply_optimizer_in_backward(torch.optim.SGD, trained[:2], options)
        _apply_optimizer_in_backward(torch.optim.SGD, trained[2:], {**options, "lr": 0.02})
    model = DDP(net, bucket_cap_mb=0.0001, gradient_as_bucket_view=as_view)
    if kind == "hook":
        state = comm_hooks.OptimizerInBackward(torch.optim.SGD, trained, **options)
        for parameter in trained[2:]:
            state.optimizers[parameter].param_groups[0]["lr"] = 0.02
        model.register_comm_hook(state, comm_hooks.optimizer_in_backward_hook)
    else:
        with parallel_raises(RuntimeError, match="can only be called once"):
            model.register_comm_hook(None, comm_hooks.allreduce_hook)
    groups = [{"params": list(alone.parameters())[:2]}]
    groups += [{"params": list(alone.parameters())[2:], "lr": 0.02}]
    optimizer = torch.optim.SGD(groups, **options)
    for x in data(5):
        loss = squares(model, mine(x))
        loss.backward()
        parallel_assert(all(p.grad is None for p in model.parameters()))
        optimizer.zero_grad()
        whole = squares(alone, x)
        whole.backward()
        optimizer.step()
        mean = loss.detach()
        dist.all_reduce(mean, dist.ReduceOp.AVG)
        parallel_assert(abs(mean.item() - whole.item()) <= 1e-5)
        parallel_assert(distance(model, alone) <= 1e-6, f"off by {distance(model, alone)}")


def test_optimizers_attached_after_wrapping() -> None:
    net, alone = Net(), Net()
    trained = list(net.parameters())
    model = DDP(net, bucket_cap_mb=0.0001)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.05)
    for step, x in enumerate(data(4)):
        if step in (1, 2):  # before the first step the parameters are averaged only
            some = trained[:2] if step == 1 else trained[2:]
            _apply_optimizer_in_backward(torch.optim.SGD, some, {"lr": 0.05})
        squares(model, mine(x)).backward()
        squares(alone, x).backward()
        if step == 0:
            model.zero_grad()
        else:
            named = zip(trained, alone.parameters(), strict=True)
            frozen = [p.detach().clone() for p in alone.parameters()] if step == 1 else []
            optimizer.step()
            with torch.no_grad():
                for index, (own, other) in enumerate(named):
                    if step == 1 and index >= 2:
                        other.copy_(frozen[index])
                        own.grad = None
        optimizer.zero_grad()
        parallel_assert(distance(model, alone) <= 1e-6, f"step {step}: {distance(model, alone)}")
    other = DDP(Net())
    other.register_comm_hook(None, comm_hooks.allreduce_hook)
    _apply_optimizer_in_backward(torch.optim.SGD, other.module.parameters(), {"lr": 0.05})
    with parallel_raises(RuntimeError, match="give it one of the two"):
        other(mine(data(1)[0]))


def test_optimizers_that_are_refused_stay_attached() -> None:
    module = nn.Linear(2, 1)
    model = DDP(module)
    model.register_comm_hook(None, comm_hooks.allreduce_hook)
    _apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.05})
    with parallel_raises(RuntimeError, match="give it one of the two"):
        model(torch.ones(1, 2))
    del model
    gc.collect()
    before = module.weight.detach().clone()
    module(torch.ones(1, 2)).sum().backward()
    parallel_assert(torch.allclose(module.weight, before - 0.05))


@pytest.mark.parametrize(
    "when", ["after forward", "before no_sync", "after a forward under no_sync", "bare module"]
)
def test_optimizers_attached_at_any_time(when: str) -> None:
    net, alone = Net(), Net()
    model = DDP(net, bucket_cap_mb=0.0001)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.05)
    first, *others = data(4)

    def attach() -> None:
        _apply_optimizer_in_backward(torch.optim.SGD, net.parameters(), {"lr": 0.05})

    if when == "after forward":
        loss = squares(model, mine(first))
        attach()
        loss.backward()
    elif when in ("after a forward under no_sync", "bare module"):
        with model.no_sync():
            loss = squares(net if when == "bare module" else model, mine(first))
        attach()
        loss.backward()
        parallel_assert(distance(model, alone) == 0)  # nothing steps before the average
        squares(model, mine(first)).backward()
        squares(alone, first).backward()
    else:
        attach()
        with model.no_sync():
            squares(model, mine(first)).backward()
        parallel_assert(distance(model, alone) == 0)  # nothing steps before the average
        squares(model, mine(first)).backward()
        squares(alone, first).backward()
    squares(alone, first).backward()
    optimizer.step()
    for x in others:
        parallel_assert(distance(model, alone) <= 1e-6, f"off by {distance(model, alone)}")
        squares(model, mine(x)).backward()
        optimizer.zero_grad()
        squares(alone, x).backward()
        optimizer.step()
    parallel_assert(distance(model, alone) <= 1e-6, f"off by {distance(model, alone)}")


@pytest.mark.parametrize("first", [True, False], ids=["before", "after wrapping"])
def test_an_optimizer_attached_to_a_delayed_parameter_is_refused(first: bool) -> None:
    net = Net()
    named = [("last.weight", net.last.weight)]
    arguments = {
        "delay_all_reduce_named_params": named,
        "param_to_hook_all_reduce": net.first.weight,
    }
    if not first:
        model = DDP(net, **arguments)
    _apply_optimizer_in_backward(torch.optim.SGD, net.parameters(), {"lr": 0.05})
    with parallel_raises(RuntimeError, match=r"to last.weight, which is one of delay_all_reduce"):
        DDP(net, **arguments) if first else model(mine(data(1)[0]))


# --- buffers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("sync", [True, False])
def test_losses_with_running_statistics(sync: bool) -> None:
    def build() -> nn.Module:
        net = Net()
        net.middle = nn.Sequential(net.middle, nn.BatchNorm1d(7))
        return net

    model = side_by_side(build, squares, data(), by_rank=True, forward_sync_buffers=sync)
    model.eval()
    parallel_assert(bool(torch.isfinite(squares(model, mine(data(1)[0])))))


def test_an_empty_parameter_may_have_strides_of_zero() -> None:
    class Empty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.none = nn.Parameter(torch.empty_strided((3, 0), (0, 0)))
            self.some = nn.Parameter(torch.ones(2))

        def forward(self) -> torch.Tensor:
            return self.some.sum() + self.none.sum()

    model = DDP(Empty())
    (model() * (dist.get_rank() + 1)).backward()
    wanted = (dist.get_world_size() + 1) / 2
    parallel_assert(torch.allclose(model.module.some.grad, torch.full((2,), wanted)))
    parallel_assert(model.module.none.grad.shape == (3, 0))
