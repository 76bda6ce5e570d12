#!/usr/bin/env python
"""Run the long forms of the tests about faults and bad input, and print what came of each.

    python tests/reliability.py                    every row: an hour and more on two cores
    python tests/reliability.py --rows kill input  some of them
    python tests/reliability.py --short            the short forms that CI runs, to try it

The last run's output stands in docs/reliability.md. mpirun is the one beside this Python, else the
one on PATH. Exits with 0 only if every row ran and none failed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import run as runner

TESTS = Path(__file__).resolve().parent


@dataclass
class Row:
    """One line of the table: tests, the numbers of ranks they run with, and what came of them.

    Attributes
    ----------
    name : str
        For ``--rows``.
    what : str
        The promise.
    tests : list of str
        Files, and names of tests for ``-k`` behind a colon.
    np : tuple of int
        Numbers of ranks; empty for tests that need none or start mpirun themselves.
    least : int
        Cases that the long form must have run.
    cases, failed, slowest, seconds
        What came of it. `slowest` is the worst single case, in seconds.
    problems, grown, left_out : list of str
        What failed; by how much the processes grew, where that is what is tried; the tests that
        this MPI leaves out, and why.
    """

    name: str
    what: str
    tests: list[str]
    np: tuple[int, ...] = ()
    least: int = 1
    cases: int = 0
    failed: int = 0
    slowest: float = 0.0
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)
    grown: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)


def rows() -> list[Row]:
    """The fault table."""
    endings = "engine/test_endings.py"
    absent, soak = "engine/test_absent.py", "engine/test_soak.py"
    bad, objects = "collectives/test_bad_input.py", "collectives/test_objects_errors.py"
    over_mpi, nccl = "backends/cuda_over_mpi", "backends/nccl"
    return [
        Row("mismatch", "ranks disagree: DistMismatchError on all <= 1 s, group usable",
            ["engine/test_mismatches.py", "engine/test_agreement.py"], (2, 3, 4), 300),
        Row("absent", "never comes, late, in a callback: named at timeout + <= 1 s",
            [absent, f"{endings}:stopped"], (2, 3, 4), 90),
        Row("kill", "SIGKILL in all_reduce: job ends <= 5 s, names rank, op, number",
            [f"{endings}:killed_in_the_middle"], (), 100),
        Row("ending", "exception, exit, SIGTERM, Ctrl-C: <= 2 s, nothing left behind",
            [f"{endings}:fails_ends_the_job or ctrl_c or watchdog or nobody"], (), 25),
        Row("fork", "forked children get an error, data loaders train on",
            [f"{endings}:forked or children"], (), 3),
        Row("input", "wrong arguments: right exception with the fix, nothing begun",
            [bad, "engine/test_buffers.py:refused", objects], (1, 2, 4), 1000),
        Row("memory", "buffers in flight, dropped Works, 10,000 Works, any exit: safe",
            [f"{soak}:works", "engine/test_work.py", f"{endings}:any_state or dropped"], (2, 4),
            10_000),
        Row("fuzz", "random calls: no crash, documented errors only",
            ["collectives/test_fuzz.py"], (2, 3), 20_000),
        Row("soak", "1,000,000 mixed operations over 4 ranks: nothing grows",
            [f"{soak}:operations"], (4,), 1_000_000),
        Row("groups", "10,000 groups made and destroyed: nothing grows",
            [f"{soak}:groups"], (4,), 10_000),
        Row("starts", "200 starts and ends of the process group: nothing grows",
            [f"{soak}:starts"], (4,), 200),
        Row("payload", "hostile object payloads: refused, nothing runs, memory bounded",
            ["codec/test_reader.py", "collectives/test_objects_hostile.py"], (2, 3), 50),
        Row("chaos", "random faults: no wrong result, no hang, no crash, deadline + 1 s",
            ["tree/test_chaos.py"], (), 5_000),
        Row("ring", "CUDA tensors over MPI: typed errors at timeout + <= 1 s, 2^31 + 17 elements",
            [f"{over_mpi}/test_faults.py", f"{over_mpi}/test_endings.py"], (2, 3, 4), 40),
        Row("nccl", "NCCL, fault x mode: typed error at timeout + <= 1 s, job usable",
            [f"{nccl}/test_faults.py", f"{nccl}/test_without_mpi.py"], (1, 2, 3, 4), 350),
        Row("survive", "ranks killed: the others train on, bit for bit; or a warning at the start",
            ["groups/test_reconfigure.py", "elastic/test_elastic.py"], (), 1),
        Row("restart", "killed jobs start again and end bit for bit as undisturbed ones",
            ["elastic/test_restarts.py:killed_jobs"], (), 10),
        Row("nodes", "2 nodes: kill, stop, cut link: named at timeout + <= 1 s, nothing left",
            ["engine/test_node_faults.py"], (), 90),
        Row("hangs", "late, absent, mismatched: rank, op, number and line are named",
            ["recordings/test_reports.py:explained"], (), 39),
        Row("server", "debug server attacked, killed, rank killed: job undisturbed",
            ["debug/test_server.py"], (), 300),
    ]  # fmt: skip


def pytest_call(test: str) -> list[str]:
    """Arguments for one entry of `Row.tests`."""
    file, _, names = test.partition(":")
    return [str(TESTS / file), *(["-k", names] if names else [])]


def commands(row: Row, launch: list[str]) -> list[tuple[str, list[str]]]:
    """Each pytest call of a row: with how many ranks, and the command."""
    found = []
    for test in row.tests:
        # -s: what the engine says last, when it ends a job, would be lost with pytest's capture
        base = [sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider"]
        base += pytest_call(test)
        if runner.kinds.kind(TESTS / test.partition(":")[0]) in ("ranks", "standin"):
            for n in row.np:
                found.append(
                    (f"np {n}", [*launch, "-n", str(n), *base, "--with-mpi", "-m", "not memory"])
                )
        else:
            found.append(("", base))
    return found


def wait(job: subprocess.Popen, progress: Path, limit: float, what: str) -> bool:
    """Wait for a job, on a terminal with a bar of how far it is; whether it ended in time."""
    began = time.monotonic()
    terminal = sys.stderr.isatty()
    if not terminal:
        print(f"{time.strftime('%H:%M:%S')} {what}", file=sys.stderr, flush=True)
    while time.monotonic() - began < limit:
        try:
            job.wait(0.5)
            return True
        except subprocess.TimeoutExpired:
            pass
        finally:
            if terminal:
                print("\r\033[K", end="", file=sys.stderr, flush=True)
        if terminal:
            try:
                far = json.loads(progress.read_text())
                part = far["done"] / max(1, far["total"])
                bar = f"[{'#' * int(20 * part):<20}] {far['done']:,} of {far['total']:,}, "
            except (OSError, ValueError):  # nothing said yet, or half of it
                bar = ""
            seconds = f"{time.monotonic() - began:.0f} s"
            print(f"{what}: {bar}{seconds}", end="", file=sys.stderr, flush=True)
    return False


def run(row: Row, launch: list[str], env: dict[str, str], limit: float) -> None:
    """Run all of a row and add up what its tests report."""
    began = time.monotonic()
    for ranks, command in commands(row, launch):
        where = " ".join(["pytest", *command[command.index("pytest") + 5 :]])
        with tempfile.TemporaryDirectory() as folder:
            counts, report, progress, output = (
                Path(folder, name) for name in ("counts", "report", "progress", "output")
            )
            own = {**env, "HPCDIST_TEST_COUNTS": str(counts), "HPCDIST_TEST_REPORT": str(report)}
            own["HPCDIST_TEST_PROGRESS"] = str(progress)
            with output.open("wb") as sink:
                job = subprocess.Popen(
                    command, env=own, cwd=TESTS, start_new_session=True,
                    stdin=subprocess.DEVNULL, stdout=sink, stderr=subprocess.STDOUT,
                )  # fmt: skip
            ended = False
            try:
                what = f"{row.name}{', ' + ranks if ranks else ''}: {Path(where.split()[1]).name}"
                ended = wait(job, progress, limit, what)
            finally:
                if not ended:
                    runner.end(job)
            text = output.read_text(errors="replace") if ended else f"not done after {limit:g} s"
            done = json.loads(report.read_text()) if report.exists() else {}
            row.failed += done.get("failed", 0)
            if not job.returncode and not done.get("passed") and done.get("skipped"):
                why = re.findall(r"^SKIPPED \[\d+\] \S+ (.+)$", text, re.M)
                file = Path(where.split()[1]).relative_to(TESTS)
                row.left_out.append(f"{file}: {'; '.join(dict.fromkeys(why))}")
            elif job.returncode or not done.get("passed"):
                row.problems.append(f"{ranks} {where}\n{text[-3000:]}")
            reported = counts.read_text().splitlines() if counts.exists() else []
            for found in map(json.loads, reported):
                row.cases += found["cases"]
                row.slowest = max(row.slowest, found["slowest"])
                if found["grown"]:
                    row.grown.append(grown(found["grown"]))
            if not reported:  # tests that count themselves as one case each
                row.cases += done.get("passed", 0)
    row.seconds = time.monotonic() - began


def grown(more: dict[str, int]) -> str:
    """What a process held more in the end, in words."""
    memory = f"memory {more['memory'] / 2**20:+.1f} MiB"
    return ", ".join([memory, *(f"{name} {n:+d}" for name, n in more.items() if name != "memory")])


def good(row: Row, long: bool) -> bool:
    """Whether all of a row ran, and well."""
    return not row.failed and not row.problems and (row.cases >= row.least or not long)


def line(row: Row, long: bool) -> str:
    """The row's lines in the table."""
    ranks = ",".join(map(str, row.np)) or "-"
    return (
        f"{row.name:<9} {row.what:<68} {ranks:<6}{row.cases:>9}{row.slowest:>9.3f}"
        f"{row.seconds:>8.0f}  {'passed' if good(row, long) else 'FAILED'}"
        + "".join(f"\n{'':<9} grown: {each}" for each in row.grown)
        + "".join(f"\n{'':<9} not run: {each}" for each in row.left_out)
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = [row.name for row in rows()]
    parser.add_argument("--rows", nargs="+", choices=known, metavar="NAME", help=", ".join(known))
    parser.add_argument("--short", action="store_true", help="the forms that CI runs")
    parser.add_argument("--mpirun", metavar="PATH", help="another mpirun")
    parser.add_argument(
        "--timeout", type=float, default=4 * 3600, metavar="S", help="seconds for one pytest call"
    )
    options = parser.parse_args()
    mpirun = runner.find_mpirun(options.mpirun)
    name, arguments, env = runner.mpi_arguments(mpirun)
    env = {**os.environ, **env, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    env |= {"HPCDIST_TEST_MPIRUN": mpirun, "HPCDIST_TEST_LONG": "0" if options.short else "1"}
    version = subprocess.run(
        [sys.executable, "-c", "import hpcdist._engine as e; print(e.library_version())"],
        env=env, cwd=TESTS, capture_output=True, text=True, timeout=120,
    ).stdout.splitlines()  # fmt: skip
    library = " ".join(version[0].split(",")[0].split()) if version else name
    print(f"{library}, Python {platform.python_version()}, ", end="")
    print(f"{os.cpu_count()} cores, {time.strftime('%Y-%m-%d %H:%M')}", flush=True)
    head = f"{'row':<9} {'promise':<68} {'ranks':<6}{'cases':>9}{'worst s':>9}{'took s':>8}"
    print(head, flush=True)
    chosen = [row for row in rows() if not options.rows or row.name in options.rows]
    for row in chosen:
        run(row, [mpirun, *arguments], env, options.timeout)
        print(line(row, not options.short), flush=True)
    bad = [row for row in chosen if not good(row, not options.short)]
    for row in bad:
        for problem in row.problems:
            print(f"\n--- {row.name}: {problem}")
    cases = sum(row.cases for row in chosen)
    print(f"{len(chosen) - len(bad)} of {len(chosen)} rows passed, {cases:,} cases", flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
