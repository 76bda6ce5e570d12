"""What a State copies of each thing, and puts back."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from hpcdist.elastic import refusals
from hpcdist.elastic.commit import packed, unpacked
from hpcdist.elastic.parts import part_of
from hpcdist.testing import parallel_assert

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("dies", ["after unscale_", "in the step"])
def test_a_scaler_whose_step_did_not_end_unscales_again(dies, monkeypatch):
    """The repeated step took gradients 65,536 times too large."""
    model = torch.nn.Linear(2, 1, bias=False)
    sgd = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)
    parts = [part_of(thing, "thing") for thing in (model, sgd, scaler)]

    def step(stop: str) -> None:
        sgd.zero_grad()
        scaler.scale(model(torch.ones(1, 2)).sum()).backward()
        if dies == "after unscale_":
            scaler.unscale_(sgd)
            if stop:
                return
        with monkeypatch.context() as patched:
            if stop:
                patched.setattr(sgd, "step", lambda *_: 1 / 0)
            scaler.step(sgd)
        scaler.update()

    before = model.weight.detach().clone()
    step("")
    taken = [part.take() for part in parts]
    if dies == "in the step":
        with pytest.raises(ZeroDivisionError):
            step("stop")
    else:
        step("stop")
    for part, copy in zip(parts, taken, strict=True):
        part.restore(copy)
    step("")
    moved = (before - model.weight).tolist()[0]
    parallel_assert(moved == pytest.approx([2e-3] * 2, rel=1e-3), f"{moved}")


def test_a_scaler_that_is_off():
    """It was an error in the recovery: it keeps nothing of optimizers."""
    part = part_of(torch.amp.GradScaler("cpu", enabled=False), "scaler")
    part.restore(part.take())


class Tables(torch.nn.Module):
    """Forward lengthens one buffer, makes two, and fills one that is None."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(1, 1)
        self.inner.register_buffer("table", torch.arange(2.0), persistent=False)
        self.register_buffer("empty", None)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, length: int) -> None:
        self.steps += 1
        if length > len(self.inner.table):
            table = torch.arange(float(length))
            self.inner.register_buffer("table", table, persistent=False)
        if not hasattr(self, "late"):
            self.register_buffer("late", torch.zeros(()))
        if not hasattr(self, "mask"):
            self.register_buffer("mask", torch.zeros(3), persistent=False)
        if self.empty is None:
            self.empty = torch.zeros(2)
        self.late += 1
        self.empty += 1

    def content(self) -> dict[str, list[float]]:
        return {name: buffer.tolist() for name, buffer in self.named_buffers()}


def test_buffers_that_forward_makes_or_lengthens():
    """A rollback, a former spare and the next start ended with an error."""
    model = Tables()
    part = part_of(model, "model")
    begun = part.take()
    model(4)
    taken, wanted = part.take(), model.content()
    model(8)
    part.restore(taken)
    parallel_assert(model.content() == wanted, f"{model.content()}")
    part.restore(begun)
    # what no state_dict has stays where it was not there yet
    left = {"inner.table": [0.0, 1.0], "steps": 0.0, "mask": [0.0] * 3}
    parallel_assert(model.content() == left and model.empty is None, f"{model.content()}")

    fresh = Tables()
    other = part_of(fresh, "model")
    parallel_assert(other.layout() == part.layout())
    found = SimpleNamespace(step=1, own={"parts": {"model": taken}, "shards": []})
    found.own["layouts"] = refusals.layouts_of({"model": part})
    refusals.refuse_other_parts({"model": other}, found)
    other.restore(other.join(*part.divide(taken)))
    parallel_assert(fresh.content() == wanted, f"{fresh.content()}")
    saved = {"inner.weight", "inner.bias", "steps", "late", "empty"}
    parallel_assert(set(fresh.state_dict()) == saved, f"{list(fresh.state_dict())}")

    share = part.take_own()
    model(8)
    part.restore_own(share)
    parallel_assert(model.content() == left, f"{model.content()}")


class Counter(torch.nn.Module):
    """Has a count and a tensor beside its buffers, in its state_dict all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(2.0).expand(3, -1))
        self.calls, self.sums = 0, torch.zeros(2)

    def forward(self) -> None:
        self.calls += 1
        self.sums += self.calls

    def get_extra_state(self) -> dict[str, object]:
        return {"calls": self.calls, "sums": self.sums}

    def set_extra_state(self, state: dict[str, object]) -> None:
        self.calls, self.sums = state["calls"], state["sums"]


def test_the_extra_state_of_a_module_and_a_buffer_that_is_expanded():
    """The one stayed as the failed step had left it, and the other was an error in the recovery."""
    model = torch.nn.Sequential(torch.nn.Linear(1, 1), Counter())
    counter = model[1]
    part = part_of(model, "model")
    counter()
    taken = part.take()
    for _ in range(2):  # the copy stays as it is
        counter()
        part.restore(taken)
        found = counter.calls, counter.sums.tolist(), counter.table.tolist()
        parallel_assert(found == (1, [1.0] * 2, [[0.0, 1.0]] * 3), f"{found}")

    fresh = torch.nn.Sequential(torch.nn.Linear(1, 1), Counter())
    other = part_of(fresh, "model")
    other.restore(other.join(*map(unpacked, map(packed, part.divide(taken)))))
    parallel_assert(fresh[1].calls == 1 and fresh[1].sums.tolist() == [1.0] * 2)

    share = part.take_own()
    counter()
    part.restore_own(share)
    parallel_assert(counter.calls == 1)


def test_a_commit_of_an_earlier_version_has_no_extra_state():
    model = Counter()
    part = part_of(model, "model")
    taken = part.take()
    del taken["buffers"]["extra"]
    model()
    part.restore(taken)
    parallel_assert(model.calls == 1)
