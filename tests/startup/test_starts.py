"""Who starts MPI, with what thread level, and under which launcher or none: the same code runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import run_job
from no_threads import preloaded

pytestmark = pytest.mark.jobs

STARTS = str(Path(__file__).with_name("starts.py"))


@pytest.mark.parametrize(
    "program",
    [
        "hpcdist_alone",
        "without_destroy_twice",
        "mpi4py_before",
        "mpi4py_after",
        "some_ranks",
        "several_threads",
    ],  # fmt: skip
)
def test_whoever_starts_mpi(program):
    ranks = 3 if program == "some_ranks" else 2
    ended = run_job(ranks, STARTS, program)
    assert ended.code == 0 and ended.text.count("well") == ranks, ended.text


def test_an_mpi_with_fewer_threads_works_and_is_warned_about():
    ended = run_job(2, STARTS, "fewer_threads")
    assert ended.code == 0 and ended.text.count("well") == 2, ended.text
    assert ended.text.count("level serialized") == 2 or "level multiple" in ended.text, ended.text
    if "level serialized" in ended.text:
        assert "thread" in ended.text.lower().replace("level serialized", ""), ended.text


def test_without_a_launcher_the_world_is_one():
    env = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMI", "PMIX"))}
    done = subprocess.run(
        [sys.executable, STARTS, "hpcdist_alone"],
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0 and "well" in done.stdout, done.stdout + done.stderr


def test_a_watchdog_that_cannot_start_is_an_error_on_all_ranks(tmp_path):
    program = str(Path(__file__).with_name("no_watchdog.py"))
    ended = run_job(2, program, limit=40, env=preloaded(tmp_path))
    assert ended.code == 0 and ended.text.count("started again") == 2, ended.text
