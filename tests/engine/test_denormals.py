"""Sums of denormals do not depend on the thread in which MPI adds."""

from __future__ import annotations

from pathlib import Path

import pytest
from jobs import run_job

pytestmark = pytest.mark.jobs

PROGRAM = str(Path(__file__).with_name("denormals.py"))


def test_a_thread_that_flushes_denormals_is_inside_mpi() -> None:
    env = {"HPCDIST_NODES": "2", "HPCDIST_TWO_LEVEL": "on"}
    text = run_job(4, PROGRAM, env=env, limit=60).text
    for rank in range(4):
        assert f"rank {rank}: 0 of " in text, text
