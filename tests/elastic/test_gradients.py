"""A step that adds to the gradients of the steps before finds those of the last commit again."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as td

import hpcdist as dist
import hpcdist.torch
from hpcdist.elastic.parts import part_of
from hpcdist.errors import DistError
from hpcdist.testing import parallel_assert

pytestmark = [pytest.mark.ranks, pytest.mark.once]

STEPS = 9
#: torch's group of all ranks, over hpcdist.
_torchs: list[Any] = []
#: Where a step may fail.
PLACES = ("begun", "zeroed", "backward", "stepped", "ended")
MODELS = ("plain", "hpcdist", "hpcdist, views", "torch", "torch, views")
#: Where gradients are dropped, and whether they are zeros then.
STYLES = ("at the start", "at the start, zeros", "at the end", "at the end, zeros")


@pytest.fixture(autouse=True)
def torchs_group() -> Iterator[None]:
    """Beside torch's default group, which may be gloo's: tests that compare leave it."""
    found = td.is_initialized()
    if not found:
        hpcdist.torch.init_process_group()
    _torchs.append(td.new_group(backend="hpcdist"))
    yield
    td.destroy_process_group(_torchs.pop())
    if not found:
        td.destroy_process_group()


class _Failure(Exception):
    """Of a step."""


def _build(kind: str) -> Any:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1))
    views = kind.endswith("views")
    if kind.startswith("torch"):
        return torch.nn.parallel.DistributedDataParallel(
            model, gradient_as_bucket_view=views, process_group=_torchs[-1]
        )
    if kind.startswith("hpcdist"):
        return dist.DistributedDataParallel(model, gradient_as_bucket_view=views)
    return model


def _train(
    model: Any, style: str, every: Callable[[int], int], local: bool, fails: dict[int, str]
) -> tuple[list[float], list[bool]]:
    """Return the parameters, and which commits had copies of gradients."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    parts = [part_of(thing, "thing") for thing in (model, optimizer)]
    taken, copied, zeros = [part.take() for part in parts], [], style.endswith("zeros")
    index, left = 0, dict(fails)
    while index < STEPS:
        place = left.pop(index, "")

        def reach(here: str, place: str = place) -> None:
            if here == place:
                raise _Failure

        try:
            reach("begun")
            if style.startswith("at the start") and index % every(index) == 0:
                optimizer.zero_grad(set_to_none=not zeros)
            reach("zeroed")
            last = index % every(index) == every(index) - 1
            generator = torch.Generator().manual_seed(10 * index + dist.get_rank())
            apart = local and not last and hasattr(model, "no_sync")
            with model.no_sync() if apart else contextlib.nullcontext():
                model(torch.randn(6, 4, generator=generator)).square().mean().backward()
            reach("backward")
            if last:
                optimizer.step()
                reach("stepped")
                if style.startswith("at the end"):
                    optimizer.zero_grad(set_to_none=not zeros)
            reach("ended")
            taken, index = [part.take() for part in parts], index + 1
            copies = taken[0].get("gradients", {}).get("copies") or []
            copied.append(any(each is not None for each in copies))
        except _Failure:
            for part, copy in zip(parts, taken, strict=True):
                part.restore(copy)
    return [x for p in model.parameters() for x in p.detach().flatten().tolist()], copied


@pytest.mark.parametrize("local", [False, True], ids=["averaged", "no_sync"])
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("kind", MODELS)
def test_a_repeated_step_adds_to_what_it_added_to_before(kind, style, local, rng):
    """It began with none, and the next optimizer step took a part of the gradient."""
    for every in (1, 2, 3):
        wanted, _ = _train(_build(kind), style, lambda _, every=every: every, local, {})
        for _ in range(2):
            fails = {i: rng.choice(PLACES) for i in range(STEPS) if rng.random() < 0.4}
            found, _ = _train(_build(kind), style, lambda _, every=every: every, local, fails)
            right = _are_same(found, wanted)
            parallel_assert(right, f"every {every}, {fails}: {found} != {wanted}")


def _are_same(found: list[float], wanted: list[float]) -> bool:
    """Bit for bit; sums of more than two ranks depend on the buckets, which torch's DDP changes."""
    if dist.get_world_size() <= 2:
        return found == wanted
    return torch.allclose(torch.tensor(found), torch.tensor(wanted), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["plain", "hpcdist", "torch"])
def test_gradients_that_steps_drop_are_not_copied(kind):
    copied = _train(_build(kind), "at the start", lambda _: 1, False, {})[1]
    parallel_assert(copied == [True] * 3 + [False] * (STEPS - 3), f"{copied}")
    fails = dict.fromkeys(range(4, 8), "backward")
    copied = _train(_build(kind), "at the start", lambda _: 1, False, fails)[1]
    parallel_assert(not any(copied[4:]), f"after failures: {copied}")


def test_the_first_step_that_adds_to_them():
    """A step that fails before it did finds them; what it has changed is an error."""

    def later(index: int) -> int:
        return 1 if index < 6 else 3

    wanted, copied = _train(_build("plain"), "at the start", later, False, {})
    parallel_assert(copied == [True] * 3 + [False] * 4 + [True] * 2, f"{copied}")
    found, _ = _train(_build("plain"), "at the start", later, False, {7: "zeroed"})
    parallel_assert(found == wanted, f"{found} != {wanted}")
    with pytest.raises(DistError, match="no copy of these.*every= of elastic"):
        _train(_build("plain"), "at the start", later, False, {7: "backward"})


@pytest.mark.parametrize("later", [False, True], ids=["always", "later"])
def test_backward_with_a_graph_adds_in_another_place(later):
    """It looked as if steps dropped their gradients, and a repeated step added to none."""

    def train(fails: set[int]) -> list[list[float]]:
        model = _build("plain")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        parts = [part_of(thing, "thing") for thing in (model, optimizer)]
        taken, index = [part.take() for part in parts], 0
        while index < 12:
            adds = not later or index >= 6
            if index % 3 == 0 or not adds:
                optimizer.zero_grad()
            generator = torch.Generator().manual_seed(index)
            loss = model(torch.randn(6, 4, generator=generator)).square().mean()
            loss.backward(create_graph=adds)
            if index in fails:
                fails.discard(index)
                for part, copy in zip(parts, taken, strict=True):
                    part.restore(copy)
                continue
            if index % 3 == 2 or not adds:
                optimizer.step()
            taken, index = [part.take() for part in parts], index + 1
        return [p.flatten().tolist() for p in model.parameters()]

    wanted = train(set())
    for fails in ({7, 8, 10}, {9, 11}):
        found = train(set(fails))
        parallel_assert(found == wanted, f"{fails}: {found} != {wanted}")
    if later:
        with pytest.raises(DistError, match="no copy of these"):
            train({6})


class _Branches(torch.nn.Module):
    """Uses one of its parameters in some passes only, and has a running mean per rank."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.at_times = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
        self.norm = torch.nn.BatchNorm1d(3)

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        x = self.norm(self.always(x))
        return (x + self.at_times(x) if both else x).square().sum()


@pytest.mark.parametrize("fails", ["begun", "forward", "backward"])
def test_what_passes_under_no_sync_have_used_is_known_again(fails, rng):
    """Else the average that follows takes a gradient of theirs for that of an unused parameter."""
    inputs = [torch.from_numpy(rng.standard_normal((4, 3))).float() for _ in range(3)]
    results = []
    for disturbed in False, True:
        torch.manual_seed(0)
        model = dist.DistributedDataParallel(_Branches(), find_unused_parameters=True)
        part = part_of(model, "model")
        model(inputs[0] + dist.get_rank(), False).backward()
        with model.no_sync():
            model(inputs[1] + dist.get_rank(), True).backward()
        taken = part.take()
        if disturbed:
            if fails != "begun":
                loss = model(inputs[2] - dist.get_rank(), False)
                loss.backward() if fails == "backward" else None
            part.restore(taken)
        model(inputs[2] + dist.get_rank(), False).backward()
        results.append([p.grad for p in model.parameters()] + list(model.buffers()))
    same = [torch.equal(one, other) for one, other in zip(*results, strict=True)]
    parallel_assert(all(same), same)


def test_a_parameter_that_is_a_part_itself():
    """What a step that failed had added stayed, and the repeated one added to it."""
    weight, still = torch.ones(3, requires_grad=True), torch.ones(3)
    parts = [part_of(weight, "weight"), part_of(still, "still")]

    def add(factor: float) -> list[float]:
        (factor * weight).sum().backward()
        return weight.grad.tolist()

    begun = [part.take() for part in parts]
    add(1.0)
    for part, taken in zip(parts, begun, strict=True):
        part.restore(part.join(*part.divide(taken)))
    parallel_assert(weight.grad is None and still.grad is None, f"{weight.grad}")
    found = [add(2.0)]
    taken = parts[0].take()
    found.append(add(3.0))
    parts[0].restore(parts[0].join(*parts[0].divide(taken)))
    found.append(add(3.0))
    parallel_assert(found == [[2.0] * 3, [5.0] * 3, [5.0] * 3], f"{found}")
    parts[0].restore(torch.zeros(3))  # from a commit of an earlier version
    parallel_assert(weight.tolist() == [0.0] * 3 and weight.grad is None, f"{weight.grad}")
