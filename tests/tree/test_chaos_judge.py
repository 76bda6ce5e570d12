"""The judge of tests/chaos.py: what it must not let pass."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
from places import TESTS

sys.path.append(str(TESTS))

from chaos import program  # noqa: E402
from chaos.journal import Outcome  # noqa: E402
from chaos.oracle import Judge, Stop  # noqa: E402
from chaos.rows import ROWS  # noqa: E402

pytestmark = [pytest.mark.local, pytest.mark.any_mpi]

DRAWN = program.episode("unit", 0, ["late"], [3], 5.0)
STREAM = 0


def some_step(**wanted: object) -> program.Step:
    """The first step of the program that is as wanted."""
    for move in program.moves(DRAWN, STREAM):
        for step in move:
            if len(move) == 1 and all(getattr(step, name) == each for name, each in wanted.items()):
                return step
    raise AssertionError


STEP = some_step(op="all_reduce", mode="sync", odd=None, signal=None)
TIMEOUT = DRAWN.timeouts[STEP.group]
LATE = "DistTimeoutError: timeout"


def problems(*kinds: tuple[str, float, str], stops: tuple[Stop, ...] = ()) -> list[str]:
    """What the judge says when the ranks have these outcomes of the step, and none of another."""
    journals = [
        [Outcome(STREAM, STEP.number, 0, kind, 100.0, spent, text)]
        for kind, spent, text in kinds
    ]  # fmt: skip
    return Judge(DRAWN, journals, list(stops), False).judge().problems


GOOD = ("ok", 0.001, "")
TIMED_OUT = ("error", TIMEOUT, LATE)


def test_what_may_be():
    assert problems(GOOD, GOOD, GOOD) == []
    assert problems(TIMED_OUT, TIMED_OUT, TIMED_OUT) == []
    assert problems(GOOD, GOOD, ("own", 0.001, "")) == []
    moving = ("error", TIMEOUT, LATE + " while data moved in all_reduce")
    assert problems(GOOD, moving, GOOD) == []


@pytest.mark.parametrize(
    ("said", "outcomes"),
    [
        ("WRONG", (GOOD, ("wrong", 0.001, "element 0 is 1, not 2"), GOOD)),
        ("WRONG", (TIMED_OUT, ("wrong", 0.001, "element 0 is 1, not 2"), TIMED_OUT)),
        ("MIXED", (GOOD, TIMED_OUT, GOOD)),
        ("SIGNAL", (GOOD, ("lost", 0.001, "an exception was lost"), GOOD)),
        ("WITHOUT A FAULT", (("error", 0.001, "DistMismatchError: disagree"),) * 3),
        ("BEYOND", (GOOD, ("ok", TIMEOUT + 1.5, ""), GOOD)),
    ],
)
def test_what_must_not_be(said, outcomes):
    found = problems(*outcomes)
    assert found and said in found[0], found
    assert "rank 1" in found[0] and str(STEP) in found[0]


def test_the_time_in_which_a_rank_was_stopped_does_not_count():
    slow = ("ok", TIMEOUT + 1.5, "")
    assert problems(GOOD, slow, GOOD, stops=(Stop(1, 100.1, 101.6),)) == []
    assert problems(GOOD, slow, GOOD, stops=(Stop(0, 100.1, 101.6),)) != []


def test_a_program_is_drawn_alike_everywhere():
    again = program.episode("unit", 0, ["late"], [3], 5.0)
    assert again == DRAWN
    both = (program.moves(each, STREAM) for each in (DRAWN, again))
    for _, one, other in zip(range(500), *both, strict=False):
        assert one == other


@pytest.mark.parametrize("row", ROWS)
def test_every_row_has_what_it_says(row):
    drawn = replace(DRAWN, row=ROWS[row], timeouts=ROWS[row].timeouts)
    steps = [step for _, move in zip(range(800), program.moves(drawn, 0)) for step in move]  # noqa: B905
    assert any(step.late for step in steps) == bool(ROWS[row].late or ROWS[row].signals)
    assert any(step.odd for step in steps) == bool(ROWS[row].odd)
    assert any(step.signal for step in steps) == bool(ROWS[row].signals)
