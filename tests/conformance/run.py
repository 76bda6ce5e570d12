#!/usr/bin/env python
"""Run the suite that PyTorch ships for its own distributed backends over hpcdist.

    python tests/conformance/run.py                           the bridge, 4 ranks
    python tests/conformance/run.py --native --np 2 3 4       the native module
    python tests/conformance/run.py --bridge --native --gloo  both, and gloo to compare with
    python tests/conformance/run.py --only test_gather --verbose

The outcome of every test is compared with expected.txt, which names each test that is skipped or
fails, with its reason. Exits with 0 only if everything is as it says there: nothing else failed,
nothing hung or crashed, and no entry is needless. The table is about torch 2.13 for CPUs; with
another torch only what fails, hangs or crashes counts, unless it needs a GPU. A test that hangs or
crashes ends its job; a new job goes on with the next one.

mpirun is the one beside this Python, else the one on PATH. Needs the package expecttest.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "support")]

from expected import Table, of_this_torch  # noqa: E402
from jobs import mpirun_command  # noqa: E402

#: Seconds beyond the deadline of a test, which shows the stacks, after which a job is ended from
#: outside.
PATIENCE = 30.0
#: Seconds until a job's first test begins.
STARTING = 120.0
#: New jobs after a hang or a crash.
RESTARTS = 20


@dataclass
class Outcome:
    """What became of one test: passed, skipped, failed, or crashed."""

    kind: str
    reason: str = ""


@dataclass
class Run:
    """The suite over one side with one number of ranks."""

    side: str
    np: int
    tests: list[str] = field(default_factory=list)
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    seconds: float = 0.0
    problem: str = ""

    def count(self, kind: str) -> int:
        return sum(outcome.kind == kind for outcome in self.outcomes.values())


def end(job: subprocess.Popen[bytes]) -> None:
    """End an mpirun and its ranks: ask it first, it knows them all."""
    job.send_signal(signal.SIGTERM)
    try:
        job.wait(10)
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, signal.SIGKILL)
        job.wait()


def one_job(found: Run, report: Path, options: argparse.Namespace, first: str | None) -> bool:
    """Run the tests from the first one on; tell whether the job came to its end."""
    mpirun, env = mpirun_command(found.np)
    command = [*mpirun, sys.executable, str(HERE / "suite.py"), found.side]
    command += ["--report", str(report)]
    command += ["--first", first] if first else []
    command += ["--only", *options.only] if options.only else []
    command += ["--match", options.match, "--deadline", str(options.deadline)]
    command += ["--verbose"] if options.verbose else []
    command += ["--hang", options.hang] if options.hang else []
    report.write_text("")
    # A compiler that was killed leaves a broken library in the cache that all programs share.
    env = {**env, "TORCHINDUCTOR_CACHE_DIR": str(report.parent / "inductor")}
    job = subprocess.Popen(
        command,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=None if options.progress or options.verbose else subprocess.DEVNULL,
        stderr=None if options.verbose else subprocess.DEVNULL,
        start_new_session=True,
    )
    seen, heard, limit = 0, time.monotonic(), options.starting
    try:
        while job.poll() is None and time.monotonic() - heard < limit:
            time.sleep(0.1)
            size = report.stat().st_size
            if size != seen:
                seen, heard = size, time.monotonic()
                limit = deadline_of_the_last(report, options) + PATIENCE
    finally:
        if job.poll() is None:
            end(job)
    return read(found, report, job.returncode)


def deadline_of_the_last(report: Path, options: argparse.Namespace) -> float:
    """Return the seconds that the test has which began last."""
    seconds = options.deadline
    for line in report.read_text().splitlines(keepends=True):
        if line.endswith("\n"):  # else it is still being written
            seconds = json.loads(line).get("limit", seconds)
    return seconds


def read(found: Run, report: Path, code: int) -> bool:
    """Take over what a job has reported."""
    began, done = "", False
    for line in report.read_text().splitlines():
        entry = json.loads(line)
        if "tests" in entry:
            found.tests = found.tests or entry["tests"]
        began = entry.get("began", began)
        if "test" in entry:
            found.outcomes[entry["test"]] = Outcome(entry["kind"], entry["reason"])
        done = done or "done" in entry
    if not done:
        if not began:
            found.problem = f"the job ended with exit status {code} before its first test"
        elif began not in found.outcomes:
            found.outcomes[began] = Outcome("crashed", f"the job ended with exit status {code}")
    elif code:
        found.problem = f"the job ended with exit status {code} after its last test"
    return done


def run(side: str, np: int, options: argparse.Namespace) -> Run:
    """Run the whole suite, with as many jobs as it takes."""
    found = Run(side, np)
    start = time.monotonic()
    first = None
    with tempfile.TemporaryDirectory(prefix="hpcdist-conformance.") as folder:
        for _ in range(RESTARTS):
            done = one_job(found, Path(folder) / "report", options, first)
            left = [test for test in found.tests if test not in found.outcomes]
            if done or found.problem or not left:
                break
            first = left[0]
        else:
            found.problem = f"ended {RESTARTS} times by a hang or a crash"
    if not found.outcomes and not found.problem:
        found.problem = "no test ran"
    found.seconds = time.monotonic() - start
    return found


def judge(table: Table, one: Run, complete: bool) -> list[str]:
    """What is wrong with a run, by the table if it is about this torch."""
    if of_this_torch():
        return table.differences(one.side, one.np, one.outcomes, complete)
    return table.regressions(one.side, one.np, one.outcomes)


def behind(one: Run, gloo: Run) -> list[str]:
    """List the tests that gloo passes and this side does not."""
    passed = {test for test, outcome in gloo.outcomes.items() if outcome.kind == "passed"}
    return [
        f"{test}: {outcome.kind}"
        for test, outcome in one.outcomes.items()
        if outcome.kind != "passed" and test in passed
    ]


def compare(runs: list[Run]) -> None:
    """Print what gloo passes and the other sides do not, where both ran with as many ranks."""
    for gloo in (each for each in runs if each.side == "gloo"):
        for one in (each for each in runs if each.side != "gloo" and each.np == gloo.np):
            found = behind(one, gloo)
            print(f"\n{one.side}, {one.np} ranks: gloo passes {len(found)} tests that it does not")
            for line in found:
                print(f"  {line}")


def summarise(runs: list[Run], table: Table, chosen: bool) -> int:
    """Print what differs from the table, and the counts; return the exit status."""
    wrong = 0
    for one in runs:
        lines = judge(table, one, complete=not chosen)
        lines += [one.problem] if one.problem else []
        if one.side == "gloo":  # to compare with; the table is about hpcdist
            lines = [one.problem] if one.problem else []
        for line in lines:
            print(f"{one.side}, {one.np} ranks: {line}")
        wrong += len(lines)
    print(
        f"\n{'':8}{'ranks':>6}{'passed':>8}{'failed':>8}{'crashed':>9}{'skipped':>9}{'seconds':>9}"
    )
    for one in runs:
        print(
            f"{one.side:8}{one.np:>6}{one.count('passed'):>8}{one.count('failed'):>8}"
            f"{one.count('crashed'):>9}{one.count('skipped'):>9}{one.seconds:>9.1f}"
        )
    well = "as expected.txt says" if of_this_torch() else "no failure that expected.txt has not"
    print(well if not wrong else f"{wrong} differences from expected.txt")
    return 1 if wrong else 0


def reasons(runs: list[Run]) -> None:
    """Print every reason with its tests: the material of expected.txt."""
    for one in runs:
        print(f"\n{one.side}, {one.np} ranks")
        kinds = Counter((o.kind, o.reason) for o in one.outcomes.values() if o.kind != "passed")
        for (kind, reason), number in kinds.most_common():
            print(f"{number:4} {kind}: {reason}")
            for test, outcome in one.outcomes.items():
                if (outcome.kind, outcome.reason) == (kind, reason):
                    print(f"         {test}")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="tests/conformance/run.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--np", type=int, nargs="+", default=[4], metavar="N", help="ranks")
    for side, what in (
        ("bridge", "torch.distributed over the backend hpcdist (the default)"),
        ("native", "hpcdist in place of torch.distributed"),
        ("gloo", "torch.distributed over gloo, to compare with"),
    ):
        parser.add_argument(f"--{side}", dest="sides", action="append_const", const=side, help=what)
    parser.add_argument("--only", nargs="+", metavar="TEST", help="these tests")
    parser.add_argument(
        "-k", dest="match", default="", metavar="REGEX", help="tests of such a name"
    )
    parser.add_argument(
        "--deadline", type=float, default=60.0, metavar="S", help="seconds for one test (60)"
    )
    parser.add_argument(
        "--hang", metavar="TEST", default="", help="hang in place of this test, to see what happens"
    )
    parser.add_argument(
        "--quiet", dest="progress", action="store_false", help="no line for each test"
    )
    parser.add_argument("--verbose", action="store_true", help="show tracebacks and stacks")
    parser.add_argument(
        "--save",
        type=Path,
        metavar="FILE",
        help="add the outcomes to this file; see side_by_side.py",
    )
    parser.add_argument(
        "--starting",
        type=float,
        default=STARTING,
        metavar="S",
        help=f"seconds until a job's first test begins ({STARTING:.0f})",
    )
    parser.add_argument("--reasons", action="store_true", help="list what did not pass, and why")
    options = parser.parse_args(arguments)
    if min(options.np) < 2:
        parser.error("the suite needs two ranks or more")
    return options


def save(one: Run, path: Path) -> None:
    """Put a run's outcomes in a file, in place of older ones of these tests."""
    saved = json.loads(path.read_text()) if path.exists() else {}
    saved.setdefault(str(one.np), {}).setdefault(one.side, {}).update(
        {test: [outcome.kind, outcome.reason] for test, outcome in one.outcomes.items()}
    )
    path.write_text(json.dumps(saved, indent=1) + "\n")


def main() -> int:
    options = parse()
    runs = []
    for side in options.sides or ["bridge"]:
        for np in options.np:
            runs.append(run(side, np, options))
            if options.save:
                save(runs[-1], options.save)
    if options.reasons:
        reasons(runs)
    compare(runs)
    return summarise(runs, Table.read(HERE / "expected.txt"), bool(options.only or options.match))


if __name__ == "__main__":
    sys.exit(main())
