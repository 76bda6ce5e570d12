"""The bench command under the mpirun that is tested: every operation with every library, right."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from jobs import run_job

pytestmark = pytest.mark.jobs


def test_the_command_measures_every_library(tmp_path: Path) -> None:
    path = tmp_path / "all.csv"
    arguments = ["bench", "all", "-e", "64", "-n", "2", "-w", "1", "-c", "2", "-q"]
    libraries = ["hpcdist", "c", "c-async", "floor", "mpi4py"]
    ended = run_job(
        2, "-m", "hpcdist", *arguments, "-l", *libraries, "--format", "csv", "-o", str(path)
    )
    assert ended.code == 0, ended.text
    rows = list(csv.DictReader(line for line in path.open() if line[0] != "#"))
    assert all(float(row["time_us"]) > 0 for row in rows), rows
    # the floor has no result
    assert all(row["wrong"] == ("" if row["library"] == "floor" else "0") for row in rows), rows
    seen = {(row["operation"], row["library"]) for row in rows}
    operations = {operation for operation, _ in seen}
    assert len(operations) == 10
    expected = {(operation, library) for operation in operations for library in libraries}
    assert seen == expected - {("barrier", "floor")}
