"""A job that a scheduler suspends for longer than its timeouts goes on where it was."""

from __future__ import annotations

from pathlib import Path

import pytest
from jobs import run_job

pytestmark = pytest.mark.jobs

PROGRAM = str(Path(__file__).with_name("suspended.py"))


@pytest.mark.parametrize("nodes", ["1", "2"])
def test_a_job_that_is_suspended(nodes: str) -> None:
    ended = run_job(2, PROGRAM, env={"HPCDIST_NODES": nodes}, limit=60)
    assert "rank 0: right" in ended.text, ended.text
    assert "rank 1: right" in ended.text, ended.text
    assert ended.code == 0, ended.text
