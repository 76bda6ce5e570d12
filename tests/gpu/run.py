#!/usr/bin/env python
"""Run on one GPU all that needs one, and print a table for docs/gpu.md.

    python tests/gpu/run.py --output DIR --seconds 540   the rows that fit, and files of results
    python tests/gpu/run.py -k overlap                   rows whose name has "overlap"
    python tests/gpu/run.py -k "not cores"               rows whose name has not
    python tests/gpu/run.py --list                       the rows, with their seconds
    python tests/gpu/run.py --stand-in                   rehearse without a GPU: see rehearsal.py

Needs a torch built with CUDA and its NCCL, hpcdist installed, and for most rows an mpirun (the
variable MPIRUN, PATH, or beside Python). The rows come in the order of their worth, each in a
process of its own with a limit on its time. A row that cannot run has failed. DIR gets three files:
rows.jsonl, a line for each row as it ends, table.md, and output.log with all that the rows print.

Exits with 1 if a row failed, with 130 after Ctrl-C, and with 2 if no row has that name, or if a row
needs a GPU and there is none: nothing is run then.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import gpu_rows_cores  # noqa: E402
import gpu_rows_mpi  # noqa: E402
import gpu_rows_nccl  # noqa: E402
import gpu_rows_speed  # noqa: E402
import gpu_rows_training  # noqa: E402
from gpu_isolate import adopt, end_all, isolated, tail  # noqa: E402
from gpu_report import FAILED, Report, Result  # noqa: E402
from gpu_table import Row, machine, rehearse  # noqa: E402

TOPICS = (gpu_rows_nccl, gpu_rows_mpi, gpu_rows_speed, gpu_rows_training, gpu_rows_cores)
ROWS: list[Row] = sorted((row for topic in TOPICS for row in topic.ROWS), key=lambda row: row.worth)
#: Seconds that a row must leave of the budget, for the report.
SPARE = 5.0


def selected(pattern: str) -> list[Row]:
    """Rows in whose name this is found, or with "not " before it, is not."""
    without, text = pattern.startswith("not "), pattern.removeprefix("not ")
    return [row for row in ROWS if bool(re.search(text, row.name, re.IGNORECASE)) != without]


def options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-k", default="", help="only rows in whose name this is found (a regex)")
    parser.add_argument("--list", action="store_true", help="only name the rows, and their seconds")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no row that "
                        "would not be done by then")  # fmt: skip
    parser.add_argument("--output", type=Path, metavar="DIR", help="write the results there too")
    parser.add_argument("--stand-in", action="store_true", help="rehearse without a GPU")
    return parser.parse_args()


def one(row: Row, log: Path, left: float, stand_in: bool) -> Result:
    """Run a row, if it fits into what is left of the budget."""
    if row.seconds + SPARE > left:
        return Result(row.name, "not run", f"needs {row.seconds} s, {max(left, 0):.0f} s were left")

    def work() -> str:
        if stand_in:
            rehearse()
        return row.function()

    with log.open("a") as file:
        file.write(f"\n=== {row.name}\n")
    before, began = log.stat().st_size, time.monotonic()
    try:
        status, said = isolated(work, log, min(row.limit, left - SPARE))
    except KeyboardInterrupt:
        status, said = "interrupted", "ended by Ctrl-C"
        end_all()
    took = round(time.monotonic() - began, 1)
    return Result(row.name, status, said, took, tail(log, before) if status in FAILED else [])


def run(rows: list[Row], report: Report, log: Path, until: float, stand_in: bool) -> bool:
    """Run the rows; tell whether the last one was reached without Ctrl-C."""
    for number, row in enumerate(rows):
        result = one(row, log, until - time.monotonic(), stand_in)
        report.add(result)
        if result.status == "interrupted":
            for left in rows[number + 1 :]:
                report.add(Result(left.name, "not run", "interrupted before"))
            return False
    return True


def interrupt(*_: object) -> None:
    """SIGTERM ends a run as Ctrl-C does."""
    raise KeyboardInterrupt


def find_machine(stand_in: bool, log: Path) -> str:
    """What this runs on, or nothing where there is no GPU."""

    def work() -> str:
        if stand_in:
            rehearse()
        return machine()

    status, said = isolated(work, log, 180)
    return said if status == "ok" else ""


def main() -> int:
    """Run the rows and print the table."""
    until, chosen = time.monotonic(), options()
    until += chosen.seconds
    rows = selected(chosen.k)
    if not rows:
        print(f"no row has {chosen.k!r} in its name; --list shows them")
        return 2
    if chosen.list:
        print(*(f"{row.seconds:4} s  {row.name}" for row in rows), sep="\n")
        print(f"{sum(row.seconds for row in rows):4} s in all")
        return 0
    import torch  # noqa: F401  once, for all rows

    import hpcdist  # noqa: F401

    adopt()
    signal.signal(signal.SIGTERM, interrupt)
    with tempfile.TemporaryDirectory(prefix="hpcdist-gpu.") as made:
        logs = chosen.output or Path(made)
        logs.mkdir(parents=True, exist_ok=True)
        log = logs / "output.log"
        found = find_machine(chosen.stand_in, log)
        if not found and any(row.gpu for row in rows):
            print(*tail(log), sep="\n")
            print("no GPU that torch can use: nothing was run")
            return 2
        if chosen.stand_in:
            print("A REHEARSAL, without a GPU and without NCCL: the figures mean nothing.\n")
        report = Report(found or f"no GPU, {os.cpu_count()} cores", chosen.output)
        done = run(rows, report, log, until, chosen.stand_in)
        failed = report.close()
    return failed if done else 130


if __name__ == "__main__":
    sys.exit(main())
