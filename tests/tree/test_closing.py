"""The end of tests/run.py: what is run once more, what is pardoned, and what the last lines say."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TESTS / "support"))

from closing import MOST, again, error_of, summarise  # noqa: E402
from stage import Stage, run  # noqa: E402
from turns import Turns  # noqa: E402

pytestmark = pytest.mark.local

#: Each test but the first fails, most of them only the first time; one fails twice at once.
CASES = """
import pathlib
import numpy as np
import pytest

pytestmark = pytest.mark.local
HERE = pathlib.Path(__file__).parent

def first(name):
    seen = HERE / name
    try:
        return not seen.exists()
    finally:
        seen.touch()

def test_right():
    pass

@pytest.mark.parametrize("n", [1, 2])
def test_late(n):
    assert n == 1 or not first("late"), "not done after 5 s"

@pytest.fixture
def leaves():
    yield
    assert not first("leaves"), "left a group"

def test_leaves(leaves):
    assert not first("takes"), "not there after 5 s"

@pytest.fixture
def stays():
    yield
    assert not first("stays"), "cannot leave"

def test_stays(stays):
    pass

def test_broken():
    assert False, "always"

def test_numbers():
    np.testing.assert_array_equal([1, 2], [1, 3 if first("numbers") else 2])

def test_crash():
    assert not first("crash"), "rank 1: Segmentation fault (11)"
"""


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    """A stage of the tests above, in a folder with the conftest of ours."""
    shutil.copy(TESTS / "conftest.py", tmp_path)
    (tmp_path / "support").symlink_to(TESTS / "support")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = local: without ranks\n")
    file = tmp_path / "test_cases.py"
    file.write_text(CASES)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    return Stage("cases", command, [str(file)], {"PATH": "/usr/bin:/bin"}, 1)


def begin(stage: Stage) -> None:
    turns = Turns()
    turns.open(stage.name)
    run(stage, 100, turns)


def test_a_test_that_passes_alone_is_flaky_and_a_wrong_number_is_wrong(stage, capsysbinary):
    begin(stage)
    assert (stage.passed, stage.failed, stage.problem) == (2, 6, "")
    flaky = again([stage], 100)
    names = [Path(one.name).name.partition("::")[2] for one in flaky]
    assert names == ["test_late[2]", "test_leaves", "test_stays"]
    assert (stage.passed, stage.failed) == (5, 3)
    assert summarise([stage], flaky, False) == 1
    lines = capsysbinary.readouterr().out.decode().splitlines()
    late, leaves, stays, broken, numbers, crash, closing = lines[-7:]
    assert all(line.startswith("FLAKY ") for line in (late, leaves, stays))
    assert "not done after 5 s" in late, late
    assert "not there after 5 s" in leaves and "left a group" in leaves, leaves
    assert "cannot leave" in stays, stays
    assert "::test_broken (cases): AssertionError: always" in broken, broken
    assert "::test_numbers (cases): " in numbers, numbers
    assert "::test_crash (cases): " in crash and "Segmentation fault" in crash, crash
    assert all(line.startswith("FAILED ") for line in (broken, numbers, crash))
    assert closing == "5 passed, 3 failed"


def test_a_stage_that_broke_down_is_no_accident(stage, capsysbinary):
    stage.tests = ["no_such_file.py"]
    begin(stage)
    assert stage.problem == "ended with exit code 4"
    assert again([stage], 100) == [] and summarise([stage], [], False) == 1
    out = capsysbinary.readouterr().out.decode().splitlines()
    assert out[-2:] == ["FAILED cases: ended with exit code 4", "0 passed, 1 failed"], out


def test_a_stage_that_ends_well_without_a_report_broke_down(stage, capsysbinary):
    """Also where the command line chose among the tests, and a stage may have none."""
    Path(stage.tests[0]).write_text("import os, pytest\n\npytestmark = pytest.mark.local\n\n"
                                    "def test_exit(): os._exit(0)\n")  # fmt: skip
    begin(stage)
    other = Stage("other", ["true"], [], {}, 1, passed=1)
    assert summarise([stage, other], [], True) == 1
    assert "ended with exit code 0 and no report" in capsysbinary.readouterr().out.decode()


def test_a_crash_is_told_with_its_place_and_its_test(stage, capsysbinary):
    """However many threads write their stacks, and whatever stands in front of the first."""
    Path(stage.tests[0]).write_text(
        "import faulthandler, threading, pytest\n\npytestmark = pytest.mark.local\n\n"
        "def test_ends():\n"
        "    threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
        "    faulthandler._sigsegv()\n"
    )
    begin(stage)
    summarise([stage], [], False)
    said = [x for x in capsysbinary.readouterr().out.decode().splitlines() if "FAILED" in x][-1]
    assert said.startswith("FAILED cases: ended with exit code -11: Segmentation fault < "), said
    assert "test_cases.py:7 test_ends" in said, said


def test_many_failures_are_no_accident():
    stage = Stage("many", ["false"], [], {}, 1, failed=MOST + 1)
    stage.failures = [[f"t::{i}", "E  late"] for i in range(MOST + 1)]
    assert again([stage], 1) == []


def test_one_line_says_what_a_report_is_about():
    assert error_of("def f():\n>  assert x\nE   AssertionError: 1 of 3\nE     more\n") == (
        "AssertionError: 1 of 3 / more"
    )
    rule = "-" * 74
    said = f"E   AssertionError: {rule}\nE     mpirun:  a rank died\nE     {rule}\n"
    assert error_of(said) == "AssertionError: / mpirun: a rank died"
    assert error_of("the test failed on ranks [1]") == "the test failed on ranks [1]"
    assert error_of("\n") == "it said nothing"
