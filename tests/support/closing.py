"""The end of tests/run.py: failed tests once more, then what came of everything."""

from __future__ import annotations

import re
from dataclasses import dataclass

from places import ROOT
from stage import Stage, end, run
from turns import Turns

#: More failures than this are no accident, and cost more time than they tell.
MOST = 8
#: Characters of an error that one line shows.
WIDTH = 600
#: A rule, as mpirun draws it above what it says.
RULE = re.compile(r"([-=*_])\1{9,}")
#: In a report: what is wrong however often it comes out right.
NEVER_EXCUSED = re.compile(
    r"Segmentation fault|Signal: |SIGSEGV|SIGBUS|SIGABRT|AddressSanitizer|ThreadSanitizer"
    r"|runtime error: |double free|corrupted|Mismatched elements|Not equal to tolerance"
    r"|Tensor-likes are not|[Ww]rong (?:number|result|sum|element)|\bis wrong\b|\bdiffers? from\b"
)


@dataclass(frozen=True)
class Flaky:
    """A test that failed, and passed when it ran alone with the same data."""

    name: str
    error: str


def from_root(name: str) -> str:
    """Return the name of a test from the repository's root on."""
    return name.removeprefix(f"{ROOT}/")


def error_of(report: str) -> str:
    """Return in one line what a test's report says: a job's output, too, stands in an error."""
    marked = [line[1:] for line in report.splitlines() if line.startswith("E  ")]
    lines = [" ".join(RULE.sub("", line).split()) for line in marked or report.splitlines()]
    return " / ".join(line for line in lines if line)[:WIDTH] or "it said nothing"


def excusable(stage: Stage, report: str) -> bool:
    """Whether a failure may have been the machine's: no crash, no wrong number."""
    return not stage.problem and not NEVER_EXCUSED.search(report)


def again(done: list[Stage], timeout: float) -> list[Flaky]:
    """Run the tests that failed once more, alone and with the same data; pardon those that pass.

    A test that finds a wrong number or a crash is not run again, nor is one of a stage that broke
    down, or where more than ``MOST`` failed.
    """
    found = []
    for stage in done:
        names = [name for name, report in stage.failures if excusable(stage, report)]
        if not names or len(stage.failures) > MOST:
            continue
        once = Stage(
            f"{stage.name}, once more", stage.command, names, dict(stage.env), stage.processes
        )
        turns = Turns()
        turns.open(once.name)
        try:
            run(once, timeout, turns)
        except BaseException:
            if once.process is not None:
                end(once.process)
            raise
        failed = {name for name, _ in once.failures}
        if once.problem or once.passed + once.failed != len(names):
            failed.update(names)
        for name, report in list(stage.failures):
            if name in names and name not in failed:
                stage.failures.remove([name, report])
                stage.failed -= 1
                stage.passed += 1
                found.append(Flaky(name, error_of(report)))
    return found


def summarise(done: list[Stage], flaky: list[Flaky], chosen: bool) -> int:
    """Print the closing table, and what failed; return the exit code.

    Parameters
    ----------
    done : list of Stage
        All of them.
    flaky : list of Flaky
        What `again` pardoned.
    chosen : bool
        Whether the command line chose among the tests: then a stage may hold none of them, but not
        all stages.
    """
    ran = sum(stage.passed + stage.failed for stage in done)
    for stage in done:
        if not stage.problem and not stage.passed + stage.failed and not (chosen and ran):
            stage.problem = "no test ran"
    for stage in done:
        if stage.problem and stage.last:
            print(f"\n=== {stage.name}: {stage.problem}; its last lines:")
            print(b"\n".join(stage.last).decode(errors="replace"))
    width = max(len(stage.name) for stage in done) + 1
    print(f"\n{'stage':<{width}}{'passed':>8}{'failed':>8}{'skipped':>9}{'seconds':>9}")
    for stage in done:
        print(
            f"{stage.name:<{width}}{stage.passed:>8}{stage.failed:>8}{stage.skipped:>9}"
            f"{stage.seconds:>9.1f}  {stage.problem}".rstrip()
        )
    slowest = sorted(((row[0], row[1], s.name) for s in done for row in s.slowest), reverse=True)
    for seconds, test, name in slowest[:5]:
        print(f"  slowest: {seconds:6.1f} s  {test}  ({name})")
    # Last, so that the end of a long output is enough to know what failed.
    for one in flaky:
        print(f"FLAKY {from_root(one.name)}: {one.error}")
    for stage in done:
        if stage.problem:
            print(f"FAILED {stage.name}: {stage.problem}")
        for name, report in stage.failures:
            print(f"FAILED {from_root(name)} ({stage.name}): {error_of(report)}")
    passed = sum(stage.passed for stage in done)
    # A stage that broke down without a failing test still counts.
    failed = sum(stage.failed or bool(stage.problem) for stage in done)
    print(f"{passed} passed, {failed} failed", flush=True)
    return 1 if failed or not passed else 0
