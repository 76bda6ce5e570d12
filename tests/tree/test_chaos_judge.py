"""The judge of tests/chaos.py: what it must not let pass."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
from places import TESTS

sys.path.append(str(TESTS))

from chaos import program  # noqa: E402
from chaos.journal import Outcome  # noqa: E402
from chaos.oracle import CALLBACK, Judge, Stop  # noqa: E402
from chaos.rows import ROWS  # noqa: E402

pytestmark = [pytest.mark.local, pytest.mark.any_mpi]

DRAWN = program.episode("unit", 0, ["late"], [3], 5.0)
STREAM = 0


def some_step(drawn: program.Episode = DRAWN, **wanted: object) -> program.Step:
    """The first step of a program that is as wanted."""
    for move in program.moves(drawn, STREAM):
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


WINDOWS = replace(
    DRAWN, row=replace(ROWS["windows"], late=0.0, signals=0.0), timeouts=(0.5, 0.5, 10.0), env={}
)
RING = some_step(WINDOWS, op="window_ring", group=0, odd=None)
SLOW = some_step(WINDOWS, op="window_sum", group=2, odd=None)
BAD = some_step(WINDOWS, op="window_overlap", odd=(1, "gaps"))
CLOSED = some_step(WINDOWS, op="window_closed", group=0)
WRONG_SUM = ("wrong", 0.001, "element 0 is 1, not 2")


def of_a_window(step: program.Step, parts: dict, drawn: program.Episode = WINDOWS) -> list[str]:
    """What the judge says of a step about a window: of each part what came of it on each rank."""
    journals = [
        [Outcome(STREAM, step.number, part, *(kinds[rank][0], 100.0, *kinds[rank][1:]))
         for part, kinds in parts.items()]
        for rank in range(3)
    ]  # fmt: skip
    return Judge(drawn, journals, [], False).judge().problems


def test_what_may_be_of_a_window():
    good, late = (GOOD,) * 3, ("error", 0.5, LATE)
    parts = (program.PUT, program.TELL, program.WAIT, program.GET, program.CLOSE)
    assert of_a_window(RING, {program.MAKE: good, **dict.fromkeys(parts, good)}) == []
    assert of_a_window(RING, {program.MAKE: (late,) * 3}) == []
    assert of_a_window(RING, {program.MAKE: good, program.CLOSE: (late,) * 3}) == []
    refused = ("error", 0.001, "ValueError: tensor_register: the tensors are not symmetric")
    assert of_a_window(BAD, {program.MAKE: (refused,) * 3}) == []
    between = replace(WINDOWS, env={"HPCDIST_CHECK_TRANSPORT": "mpi"})
    none = ("error", 0.001, "DistBackendError: the process group has no windows")
    assert of_a_window(RING, {program.MAKE: (none,) * 3}, between) == []
    assert "WITHOUT A FAULT" in of_a_window(RING, {program.MAKE: (none,) * 3})[0]


@pytest.mark.parametrize(
    ("said", "step", "part", "outcome"),
    [
        ("WRONG", RING, program.GET, WRONG_SUM),
        ("WRONG", SLOW, program.FOUND, WRONG_SUM),
        ("WRONG", BAD, program.REFUSED, ("wrong", 0.001, "range was accepted")),
        ("WRONG", CLOSED, program.ACTS, ("wrong", 5.5, "used after it had been closed")),
        ("A SIGNAL WAS LOST", RING, program.WAIT, ("error", 0.5, LATE)),
        ("WITHOUT A FAULT", SLOW, program.ADD, ("error", 10.0, LATE)),
        ("WITHOUT A FAULT", CLOSED, program.ACTS, ("error", 0.1, "IndexError: list index")),
        ("MIXED", RING, program.CLOSE, ("error", 0.5, LATE)),
        ("MIXED", RING, program.MAKE, ("error", 0.5, LATE)),
        ("BEYOND", RING, program.PUT, ("ok", 1.6, "")),
    ],
)
def test_what_must_not_be_of_a_window(said, step, part, outcome):
    good = (GOOD,) * 3
    found = of_a_window(step, {program.MAKE: good, part: (GOOD, outcome, GOOD)})
    assert any(said in each for each in found), found


def test_a_window_of_ordinary_memory_must_be_refused_by_all():
    found = of_a_window(BAD, {program.MAKE: (GOOD,) * 3})
    assert found and "A MISTAKE WAS ACCEPTED" in found[0]


HOOKS = replace(DRAWN, row=ROWS["hooks"], timeouts=(10.0,) * 3)
HOOKED = some_step(HOOKS, odd=None, late={})


def of_training(step: program.Step, *outcomes: tuple[str, float, str]) -> list[str]:
    journals = [
        [Outcome(STREAM, step.number, 0, kind, 100.0, spent, text)]
        for kind, spent, text in outcomes
    ]  # fmt: skip
    return Judge(HOOKS, journals, [], False).judge().problems


def test_gradients_that_differ_between_ranks_are_found():
    same, other = ("ok", 0.01, "0badf00d"), ("ok", 0.01, "0badf00e")
    assert of_training(HOOKED, same, same, same) == []
    drawn = replace(HOOKS, timeouts=(0.5,) * 3)
    handed_on = Outcome(STREAM, HOOKED.number, 0, "error", 100.0, 0.5, CALLBACK + LATE)
    assert Judge(drawn, [[handed_on]] * 3, [], False).judge().problems == []
    assert "gradients differ" in of_training(HOOKED, same, same, other)[0]


@pytest.mark.parametrize("how", program.ODD_HOOK)
def test_a_rank_whose_hook_fails_must_be_heard_of(how):
    for number in range(0, 40 * len(program.HOOKS), 40):
        step = replace(HOOKED, number=number, odd=(1, how))
        local = program.hook_of(HOOKS, step) in program.LOCAL
        may = local or how == "raises in a callback"
        assert program.must_fail(how, "train", "float32", program.hook_of(HOOKS, step)) != may
        judge = Judge(HOOKS, [], [], False)
        failed = ("error", 100.0, 0.01, "TypeError: the communication hook must return a future")
        kinds = (("ok", 100.0, 0.01, ""), failed, ("ok", 100.0, 0.01, ""))
        found = {rank: Outcome(STREAM, number, 0, *kind) for rank, kind in enumerate(kinds)}
        judge.collective(step, found, 10.0)
        assert bool(judge.verdict.problems) != may, program.hook_of(HOOKS, step)
    hooks = {program.hook_of(HOOKS, replace(HOOKED, number=40 * i)) for i in range(15)}
    assert hooks == set(program.HOOKS)


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
    windows = {step.op for step in steps} & set(program.WINDOWS)
    if ROWS[row].windows:
        makes_groups = ROWS[row].lonely and ROWS[row].streams == 1
        assert windows == set(program.WINDOWS[: None if makes_groups else -1])
    else:
        assert not windows
