"""Parameters that take no part: searched for, promised, or an error."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from ddp_cases import DDP, TorchDDP, distance, grads, mine, sgd, side_by_side
from gloo import gloo_world
from torch import nn
from torch.utils.checkpoint import checkpoint

import hpcdist as dist
from hpcdist.testing import parallel_assert, parallel_raises

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.filterwarnings("ignore:find_unused_parameters=True was specified"),
]


class Branches(nn.Module):
    """Four branches, of which a call uses some; nothing else is trained."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.stem = nn.Linear(5, 6)
        self.branches = nn.ModuleList(nn.Linear(6, 3) for _ in range(4))

    def forward(self, x: torch.Tensor, use: tuple[int, ...]) -> torch.Tensor:
        x = torch.tanh(self.stem(x))
        out = torch.zeros(len(x), 3)
        for index in use:
            out = out + self.branches[index](x)
        return out


def data(steps: int = 4) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(24, 5, generator=generator) for _ in range(steps)]


def used_by(step: int, rank: int) -> tuple[int, ...]:
    """Branch 0 always, 1 on some ranks, 2 in some steps, 3 never."""
    chosen = [0]
    if (rank + step) % 2:
        chosen.append(1)
    if step % 2:
        chosen.append(2)
    return tuple(chosen)


@pytest.mark.parametrize("as_view", [False, True], ids=["copies", "views"])
@pytest.mark.parametrize("cap", [None, 0])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_branches_that_differ_between_ranks_and_steps(
    cap: float | None, as_view: bool, set_to_none: bool
) -> None:
    gloo_world()
    arguments: dict[str, Any] = {
        "find_unused_parameters": True,
        "gradient_as_bucket_view": as_view,
        "bucket_cap_mb": cap,
    }
    models = [DDP(Branches(), **arguments), TorchDDP(Branches(), **arguments)]
    optimizers = [sgd(model.parameters()) for model in models]
    alone = Branches()
    single = sgd(alone.parameters())
    for step, x in enumerate(data()):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad(set_to_none)
            model(mine(x), used_by(step, dist.get_rank())).square().mean().backward()
            optimizer.step()
        single.zero_grad(set_to_none)
        parts = x.chunk(dist.get_world_size())
        losses = [alone(p, used_by(step, r)).square().mean() for r, p in enumerate(parts)]
        (sum(losses) / len(losses)).backward()
        single.step()
        for other in (models[1], alone):
            parallel_assert(distance(models[0], other) <= 1e-6, f"step {step}")
        ours, theirs = ([g is None for g in grads(model)] for model in (models[0], alone))
        parallel_assert(ours == theirs, f"step {step}: None where {ours}, not {theirs}")


@pytest.mark.parametrize("as_view", [False, True], ids=["copies", "views"])
def test_what_no_rank_used_keeps_its_gradient_to_the_bit(as_view: bool) -> None:
    model = DDP(Branches(), find_unused_parameters=True, gradient_as_bucket_view=as_view)
    x = data(1)[0][:4] + dist.get_rank()
    model(x, (0, 1, 2, 3)).square().mean().backward()
    kept = [p.grad.clone() for p in model.module.branches[2].parameters()]
    for _ in range(2):
        model(x, (0,)).square().mean().backward()
    for p, before in zip(model.module.branches[2].parameters(), kept, strict=True):
        parallel_assert(torch.equal(p.grad, before))


def test_used_under_no_sync_and_unused_after_it() -> None:
    gloo_world()
    models = [DDP(Branches(), find_unused_parameters=True)]
    models.append(TorchDDP(Branches(), find_unused_parameters=True))
    x = data(1)[0]
    for model in models:
        with model.no_sync():
            model(mine(x), (0, 1 + dist.get_rank() % 2)).square().mean().backward()
        model(mine(x), (0,)).square().mean().backward()
    for a, b in zip(grads(models[0]), grads(models[1]), strict=True):
        parallel_assert((a is None) == (b is None))
        parallel_assert(a is None or torch.allclose(a, b))


@pytest.mark.parametrize("as_view", [False, True], ids=["copies", "views"])
def test_what_no_sync_used_is_averaged_though_the_next_pass_skips_it(as_view: bool) -> None:
    arguments = {
        "find_unused_parameters": True,
        "bucket_cap_mb": 0,
        "gradient_as_bucket_view": as_view,
    }
    models = [
        DDP(Branches(), skip_all_reduce_unused_params=skip, **arguments) for skip in (True, False)
    ]
    for x in data(2):
        for model in models:
            model.zero_grad()
            with model.no_sync():
                model(mine(x), (0, 1)).square().mean().backward()
            model(mine(x), (0, 2)).square().mean().backward()
        for a, b in zip(*(grads(m) for m in models), strict=True):
            parallel_assert((a is None) == (b is None) and (a is None or torch.equal(a, b)))


class Nested(NamedTuple):
    inner: dict[str, Any]


@dataclass
class Result:
    value: Any
    note: str = "no tensor"


class Wrapping(Branches):
    """Returns its outputs deep in a nest, one of which the loss does not use."""

    def forward(self, x: torch.Tensor, use: tuple[int, ...]) -> Any:  # type: ignore[override]
        spare = self.branches[3](torch.tanh(self.stem(x)))
        return [Result(Nested({"out": (super().forward(x, use),), "spare": spare}), "text"), None]


def test_outputs_in_a_nest_of_which_some_are_not_used() -> None:
    model = DDP(Wrapping(), find_unused_parameters=True)
    expected = DDP(Branches(), find_unused_parameters=True)
    use = (0, 1 + dist.get_rank() % 2)
    for x in data(2):
        model.zero_grad()
        expected.zero_grad()
        model(mine(x), use)[0].value.inner["out"][0].square().mean().backward()
        expected(mine(x), use).square().mean().backward()
        for a, b in zip(grads(model), grads(expected), strict=True):
            parallel_assert((a is None) == (b is None) and (a is None or torch.equal(a, b)))


class Hidden:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class Hiding(Branches):
    def forward(self, x: torch.Tensor, use: tuple[int, ...]) -> Any:  # type: ignore[override]
        return Hidden(super().forward(x, use))


def test_outputs_that_the_search_cannot_see() -> None:
    model = DDP(Hiding(), find_unused_parameters=True)
    for x in data(2):
        model(mine(x), (0, 1)).tensor.square().mean().backward()
    parallel_assert(model.module.branches[1].weight.grad is not None)
    parallel_assert(model.module.branches[2].weight.grad is None)


@pytest.mark.parametrize("flag", ["find_unused_parameters", "static_graph"])
def test_a_rank_without_any_gradient(flag: str) -> None:
    """The last rank's loss leads to its input only; it counts as zeros."""

    class Skips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(6)
            self.layer = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor, skip: bool) -> torch.Tensor:
            return x * 2 if skip else self.layer(x)

    size = dist.get_world_size()
    last = dist.get_rank() == size - 1 and size > 1
    model, alone = DDP(Skips(), **{flag: True}), Skips()
    for step in range(3):
        x = torch.full((2, 3), step + 1.0, requires_grad=True)
        model.zero_grad()
        model(x, last).sum().backward()
        alone.zero_grad()
        alone(x, False).sum().backward()
        share = (size - 1) / size if size > 1 else 1
        pairs = zip(grads(model), grads(alone), strict=True)
        parallel_assert(all(torch.allclose(a, share * b) for a, b in pairs), f"step {step}")
        (slope,) = torch.autograd.grad(model(x, last).sum(), x)  # moves nothing
        parallel_assert(slope.shape == x.shape)


def test_two_forwards_with_other_branches() -> None:
    x = mine(data(1)[0])
    for together in (True, False):
        model = DDP(Branches(), find_unused_parameters=True)
        expected = DDP(Branches(), find_unused_parameters=True)
        losses = [model(x, use).square().mean() for use in ((0, 1), (0, 2))]
        if together:
            sum(losses).backward()
        else:
            for loss in losses:
                loss.backward()
        for use in ((0, 1), (0, 2)):
            expected(x, use).square().mean().backward()
        for a, b in zip(grads(model), grads(expected), strict=True):
            parallel_assert((a is None) == (b is None) and (a is None or torch.allclose(a, b)))


class Checkpointed(Branches):
    """Uses its last branch in a checkpoint that runs a backward of its own."""

    def forward(self, x: torch.Tensor, use: tuple[int, ...]) -> torch.Tensor:
        hidden = torch.tanh(self.stem(x))
        return super().forward(x, use) + checkpoint(self.branches[3], hidden, use_reentrant=True)


@pytest.mark.parametrize("kind", [Branches, Checkpointed])
def test_a_parameter_used_out_of_sight_is_named(kind: type[Branches]) -> None:
    model = DDP(kind(), find_unused_parameters=True, bucket_cap_mb=0)
    out = model(mine(data(1)[0]), (0,)).sum()
    if kind is Branches:
        out = out + model.module.branches[3].weight.sum()
    found = r"ready only once: parameter branches\.3\.(weight|bias) was taken for unused"
    ways = r"outside of the wrapped module's forward .* re-entrant .*: use .* use_reentrant=False"
    with parallel_raises(dist.DistError, match=f"{found}.* {ways}"):
        out.backward()


def test_skipping_what_is_unused_everywhere() -> None:
    arguments: dict[str, Any] = {"find_unused_parameters": True, "bucket_cap_mb": 0}
    models = [
        DDP(Branches(), skip_all_reduce_unused_params=skip, **arguments) for skip in (True, False)
    ]
    counts = []
    for model in models:
        for x in data(2):
            model.zero_grad()
            before = dist.group.WORLD.carrier.seq
            model(mine(x), (0, 2)).square().mean().backward()
            counts.append(dist.group.WORLD.carrier.seq - before)
    for a, b in zip(*(grads(m) for m in models), strict=True):
        parallel_assert((a is None) == (b is None) and (a is None or torch.equal(a, b)))
    # Four branch parameters of ten are left out, and nobody asks who used what.
    parallel_assert(counts[2] - counts[0] == 4 + (dist.get_world_size() > 1), str(counts))


# --- static graphs -----------------------------------------------------------------------------


class Unused(Branches):
    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x, (2, 0))


def squares(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


@pytest.mark.parametrize("as_view", [False, True], ids=["copies", "views"])
@pytest.mark.parametrize("cap", [None, 0])
def test_a_static_graph_with_unused_parameters(cap: float | None, as_view: bool) -> None:
    model = side_by_side(
        Unused,
        squares,
        data(),
        static_graph=True,
        bucket_cap_mb=cap,
        gradient_as_bucket_view=as_view,
    )
    parallel_assert(model.module.branches[3].weight.grad is None)
    members = [i for bucket in model.reducer.buckets for i in bucket.members]
    parallel_assert(sorted(members) == list(range(10)))


@pytest.mark.mpi(min_size=2)
def test_a_static_graph_with_other_parameters_on_each_rank() -> None:
    model = DDP(Branches(), static_graph=True)
    alone = Branches()
    for x in data(3):
        model.zero_grad()
        alone.zero_grad()
        parts = x.chunk(dist.get_world_size())
        use = [(0, 1 + rank % 2) for rank in range(len(parts))]
        model(mine(x), use[dist.get_rank()]).square().mean().backward()
        losses = [alone(p, u).square().mean() for p, u in zip(parts, use, strict=True)]
        (sum(losses) / len(losses)).backward()
        for a, b in zip(grads(model), grads(alone), strict=True):
            parallel_assert((a is None) == (b is None) and (a is None or torch.allclose(a, b)))


def test_a_static_graph_that_changes() -> None:
    model = DDP(Branches(), static_graph=True, bucket_cap_mb=0)
    x = mine(data(1)[0])
    model(x, (0, 1)).sum().backward()
    with parallel_raises(dist.DistError, match=r"graph has changed.*branches\.[1]\.\w+ got 1 grad"):
        model(x, (0,)).sum().backward()
    model(x, (0, 1)).sum().backward()
    with parallel_raises(
        dist.DistError, match=r"graph has changed.*branches\.2\.\w+ got 0 gradients.* and more"
    ):
        model(x, (0, 1, 2)).sum().backward()


def test_static_after_construction() -> None:
    model = DDP(Unused())
    model._set_static_graph()
    for x in data(2):
        model(mine(x)).square().mean().backward()
    with pytest.warns(UserWarning, match="no need to set it again"):
        model._set_static_graph()


class Undefined(torch.autograd.Function):
    """Uses its second input in forward and has no gradient for it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x + 0 * weight.sum()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


@pytest.mark.parametrize("as_view", [False, True], ids=["copies", "views"])
def test_a_gradient_that_is_not_defined_stays_none(as_view: bool) -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(8)
            self.used, self.shown = nn.Linear(3, 2), nn.Parameter(torch.ones(4))

        def forward(self, x: torch.Tensor, defined: bool) -> torch.Tensor:
            out = self.used(x)
            return out + self.shown.sum() if defined else Undefined.apply(out, self.shown)

    model = DDP(Half(), find_unused_parameters=True, gradient_as_bucket_view=as_view)
    x = torch.ones(2, 3)
    for _ in range(2):
        model.zero_grad()
        model(x, False).sum().backward()
        parallel_assert(model.module.shown.grad is None, str(model.module.shown.grad))
        parallel_assert(model.module.used.weight.grad.eq(2).all())
    # where another rank has one, all get the average
    first = dist.get_rank() == 0
    model.zero_grad()
    model(x, first).sum().backward()
    parallel_assert(
        torch.allclose(model.module.shown.grad, torch.tensor(4.0 / dist.get_world_size()))
    )


@pytest.mark.parametrize("static", [False, True], ids=["search", "static"])
def test_a_loss_that_is_a_leaf_counts_as_zeros(static: bool) -> None:
    """A rank without data returns a loss of its own; the others train."""

    class Perhaps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))
            self.loss = torch.zeros((), requires_grad=True)

        def forward(self, trains: bool) -> torch.Tensor:
            return self.weight.sum() if trains else self.loss

    about = {"static_graph": True} if static else {"find_unused_parameters": True}
    model = DDP(Perhaps(), **about)
    size, trains = dist.get_world_size(), dist.get_rank() > 0
    for _ in range(3):
        model.zero_grad()
        model(trains).backward()
        wanted = torch.full((3,), (size - 1) / size) if size > 1 else None
        found = model.module.weight.grad
        parallel_assert(
            found is None if wanted is None else torch.allclose(found, wanted), str(found)
        )
    hooks = model.module.loss._post_accumulate_grad_hooks
    parallel_assert(trains or not hooks or len(hooks) == 1, "each forward has left a hook")
    (model.module.loss * 2).backward()  # outside of the model: averages nothing
    dist.barrier()


def test_a_leaf_that_forward_returns_averages_nothing_by_itself() -> None:
    """Without a search, or beside other outputs, where it may be an input."""

    class Returns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor, loss: bool) -> Any:
            return (self.weight.sum() * x.sum(), x) if loss else x

    for about in ({}, {"find_unused_parameters": True}):
        model = DDP(Returns(), **about)
        x = torch.ones(2, requires_grad=True)
        for _ in range(2):
            model.zero_grad()
            loss, same = model(x, True)
            (same * same).sum().backward()
            parallel_assert(model.module.weight.grad is None)
            loss.backward()
            parallel_assert(torch.allclose(model.module.weight.grad, torch.full((3,), 2.0)))
    plain = DDP(Returns())
    plain(x, False).sum().backward()
    plain(x, False).backward(torch.ones(2))
    parallel_assert(plain.module.weight.grad is None)


def test_a_model_that_is_gone_leaves_no_hook_on_a_leaf() -> None:
    class Leaf(nn.Module):
        def __init__(self, loss: torch.Tensor) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))
            self.loss = [loss]

        def forward(self) -> torch.Tensor:
            return self.loss[0]

    loss = torch.zeros((), requires_grad=True)
    model = DDP(Leaf(loss), find_unused_parameters=True)
    model()
    del model
    gc.collect()
    loss.backward()
    parallel_assert(not loss._post_accumulate_grad_hooks)
