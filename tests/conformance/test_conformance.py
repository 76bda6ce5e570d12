"""PyTorch's suite for its own backends over hpcdist: as much of it as CI has time for.

In full with 4 ranks over the bridge; over the native module what is code of its own there and not
the same call again with another group or operation. ``python tests/conformance/run.py`` runs the
rest: see README.md beside it.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

pytestmark = [pytest.mark.jobs, pytest.mark.rare]

HERE = Path(__file__).parent
if str(HERE) not in sys.path:  # importlib mode leaves it out
    sys.path.insert(0, str(HERE))

import run  # noqa: E402
from expected import Table, of_this_torch  # noqa: E402

#: The least number of tests that must pass, so that a table that grew tells.
LEAST = {"bridge": 245, "native": 98}
#: The share of it that passes at least with another torch.
OTHER = 0.8
NATIVE = (
    "DistributedDataParallel|ddp|no_sync|static_graph|object|future|any_source|subgroups|Backend"
    "|^test_get|sparse|coalesced_(sum|simple|complex|with_empty|max_complex)|complex_unsupported"
    "|monitored_barrier_(failure|wait)|timeout_(arg|global)|all_to_all_single_unequal_split$"
    "|all_gather_v?$|batch_isend|test_reduce_sum$|test_gather$|test_scatter$|profiler|destroy"
)


@pytest.mark.slow
@pytest.mark.deadline(600)
@pytest.mark.parametrize(("side", "match"), [("bridge", ""), ("native", NATIVE)])
def test_what_does_not_pass_stands_in_the_table(side: str, match: str, capfd) -> None:
    options = run.parse(["--quiet", "-k", match])
    found = run.run(side, 4, options)
    table = Table.read(HERE / "expected.txt")
    wrong = run.judge(table, found, complete=not match)
    assert not wrong and not found.problem, "\n".join([found.problem, *wrong])
    assert found.count("passed") >= LEAST[side] * (1 if of_this_torch() else OTHER)
    print(f"{side}: {found.count('passed')} passed in {found.seconds:.0f} s")


@pytest.mark.any_mpi
def test_a_hang_ends_one_test_and_not_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "PATIENCE", 20.0)
    options = ["--deadline", "5", "--quiet", "--only", "test_barrier", "test_get_rank"]
    found = run.run("bridge", 2, run.parse([*options, "--hang", "test_barrier"]))
    assert not found.problem
    assert {test: o.kind for test, o in found.outcomes.items()} == {
        "test_barrier": "crashed",
        "test_get_rank": "passed",
    }
    assert Table("").differences("bridge", 2, found.outcomes, complete=True) == [
        f"test_barrier: crashed: {found.outcomes['test_barrier'].reason} (expected: passed)"
    ]


@pytest.mark.any_mpi
def test_what_only_gloo_passes_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    gloo, bridge = run.Run("gloo", 4), run.Run("bridge", 4)
    gloo.outcomes = {"test_a": run.Outcome("passed"), "test_b": run.Outcome("failed")}
    bridge.outcomes = {"test_a": run.Outcome("skipped"), "test_b": run.Outcome("failed")}
    assert run.behind(bridge, gloo) == ["test_a: skipped"]
    run.compare([bridge, gloo, run.Run("native", 2)])
    assert capsys.readouterr().out.split("\n")[1:3] == [
        "bridge, 4 ranks: gloo passes 1 tests that it does not",
        "  test_a: skipped",
    ]


# --- the table ---------------------------------------------------------------------------------

TEXT = """
# a comment
skipped: Need at least
why: needs CUDA
  test_a
  test_b [native, 2, 3]

failed: no such thing
why: gloo's own text
  test_c [4]
"""


@dataclass
class Seen:
    kind: str
    reason: str = ""


def differences(side: str, np: int, complete: bool = True, **outcomes: Seen) -> list[str]:
    return Table(TEXT).differences(side, np, outcomes, complete)


def test_the_table_holds_where_it_says() -> None:
    gpu, passed = Seen("skipped", "Need at least 2 CUDA devices"), Seen("passed")
    assert differences("native", 2, test_a=gpu, test_b=gpu, test_c=passed, test_d=passed) == []
    failed = Seen("failed", "Error: no such thing here")
    assert differences("bridge", 4, test_a=gpu, test_b=passed, test_c=failed) == []


@pytest.mark.parametrize(
    ("outcomes", "said"),
    [
        ({"test_a": Seen("passed")}, "test_a: passed; its entry (skipped) is needless"),
        (
            {"test_a": Seen("skipped", "tired")},
            "test_a: skipped: tired (expected: skipped: Need at",
        ),
        ({"test_a": Seen("failed", "Need at least")}, "test_a: failed: Need at least (expected: s"),
        ({"test_d": Seen("failed", "new")}, "test_d: failed: new (expected: passed)"),
        ({"test_d": Seen("skipped", "new")}, "test_d: skipped: new (expected: passed)"),
        ({"test_d": Seen("crashed", "gone")}, "test_d: crashed: gone (expected: passed)"),
        ({}, "test_a: the suite has no such test; its entry is needless"),
    ],
)
def test_what_is_not_as_the_table_says_is_told(outcomes: dict[str, Seen], said: str) -> None:
    found = differences("bridge", 2, complete=not outcomes, **outcomes)
    assert len(found) == 1 and found[0].startswith(said), found


def test_with_another_torch_only_new_failures_count() -> None:
    outcomes = {
        "test_a": Seen("passed"),
        "test_b": Seen("skipped", "in other words"),
        "test_c": Seen("failed", "in other words"),
        "test_d": Seen("failed", "torch.AcceleratorError: CUDA error: CUDA driver version is"),
        "test_e": Seen("failed", "AssertionError: 1 != 2"),
        "test_f": Seen("crashed", "gone"),
    }
    assert Table(TEXT).regressions("bridge", 4, outcomes) == [
        "test_e: failed: AssertionError: 1 != 2",
        "test_f: crashed: gone",
    ]
    assert Table(TEXT).regressions("bridge", 2, outcomes)[0] == "test_c: failed: in other words"


@pytest.mark.parametrize(
    "text",
    ["  test_a", "skipped: x\n  test_a", "skipped: x\nwhy: y\n  test_a [gloo]", "passed: x", "hm"],
)
def test_a_table_that_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="line"):
        Table(text)
