"""When a former spare may have the others' commit: its State must be theirs."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from hpcdist.elastic import State, handover
from hpcdist.elastic.parts import part_of
from hpcdist.groups import joining
from hpcdist.groups.world import world

pytestmark = [pytest.mark.local, pytest.mark.any_mpi]


def report(
    number: int = 0, joins: bool = True, alone: list[str] | None = None, **parts: object
) -> handover._Report:
    described = {name: part_of(thing, name).layout() for name, thing in parts.items()}
    return handover._Report(joins, not joins, number, described, alone, "", 4, [], "")


def test_another_state_is_refused():
    model, other = torch.nn.Linear(4, 4), torch.nn.Linear(4, 5)
    optimizer = torch.optim.SGD(model.parameters())
    theirs = report(joins=False, model=model, optimizer=optimizer)
    handover._check([theirs, report(model=model, optimizer=optimizer)], 0)
    for says, mine in {
        "its State has as 'optimizer' nothing, and rank 0 has a SGD": report(model=model),
        "its State has as 'model' a module with 2 tensors": report(
            model=other, optimizer=optimizer
        ),
        "it resumes State 1 of its program, and the others are in State 0": report(1),
    }.items():
        with pytest.raises(ValueError, match="rank 1, a former spare, cannot join") as error:
            handover._check([theirs, mine], 0)
        assert says in str(error.value)
    # what only some ranks have is compared with the copy of it
    theirs = report(joins=False, alone=["model"], model=model, optimizer=optimizer)
    handover._check([theirs, report(model=other, optimizer=optimizer)], 0)


def test_a_loop_after_a_join_that_failed_says_why_again(monkeypatch):
    def fail(joins):
        raise ValueError("a former spare, cannot join")

    state = State(model=torch.nn.Linear(2, 2))
    closed = SimpleNamespace(native=None)
    monkeypatch.setattr(world, "pg", SimpleNamespace(carrier=closed))
    monkeypatch.setattr(world, "spares", 1)
    monkeypatch.setattr(world, "joining", closed)
    monkeypatch.setattr(joining, "opened", nullcontext)
    monkeypatch.setattr(state, "_recover", fail)
    for _ in range(2):
        with pytest.raises(ValueError, match="cannot join"):
            state.begin()
