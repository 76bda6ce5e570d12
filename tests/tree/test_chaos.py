"""tests/chaos.py finds nothing, and would find something."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from jobs import find_mpirun
from long_form import LONG, deadline, size
from places import TESTS

pytestmark = [pytest.mark.jobs, pytest.mark.rare]

#: The short form runs rows in which nothing is known to fail; docs/reliability.md has the rest.
ROWS = [] if LONG else ["--rows", "calm", "late", "threads", "queue", "windows", "hooks"]
CHAOS = TESTS / "chaos.py"


def attack(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(CHAOS), "--mpirun", find_mpirun(), "--slack", "4", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=3000)


@deadline(120, long=1200)
def test_nothing_is_found(count):
    """Half a minute; twelve in the long form."""
    done = attack("--minutes", str(size(0.5, 12)), "--seconds", str(size(2, 10)), *ROWS)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    table = re.search(r"^all rows +(\d+) +(\d+) +(\d+) +(\d+)", done.stdout, re.MULTILINE)
    assert table, done.stdout
    count(sum(map(int, table.groups()[1:])))


def test_a_wrong_result_is_found():
    """One result in a hundred is called wrong on purpose."""
    done = attack(
        "--episode", "0", "--rows", "calm", "--np", "2", "--seconds", "2", "--damage", "0.01"
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "WRONG RESULT" in done.stdout and "damaged on purpose" in done.stdout
    again = re.search(r"again: python (\S+) (.*)", done.stdout)
    assert again and "--episode 0" in again[2] and "--seed" in again[2]


@pytest.mark.parametrize("plant", ["put", "overlap", "accumulate", "signal", "bucket"])
def test_a_planted_mistake_is_found(plant):
    """In hpcdist itself, on each rank or on one; each is a wrong number, or a lost signal."""
    row = "hooks" if plant == "bucket" else "windows"
    done = attack(
        "--episode", "0", "--rows", row, "--np", "2", "--seconds", "3", "--seed", "2",
        "--plant", plant,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    assert ("A SIGNAL WAS LOST" if plant == "signal" else "WRONG RESULT") in done.stdout
