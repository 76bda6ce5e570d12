"""What a rank says when it gives calls up goes out while the program computes.

MPI keeps messages to a stopped rank until somebody enters it again. The rank that went on then
waited for a vote that was still there, and ended the job with the words that data was moving.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from jobs import run_job

pytestmark = pytest.mark.jobs

PROGRAM = str(Path(__file__).with_name("unsent.py"))
CALLS = 30
#: Seconds. Each timeout waited for a second until its note was sent, though its reader was stopped.
FLUSHES = 15.0


@pytest.mark.parametrize("size", [64, 16384])
@pytest.mark.parametrize(
    "env", [{"HPCDIST_NODES": "2"}, {"HPCDIST_CHECK_TRANSPORT": "mpi"}], ids=["nodes", "messages"]
)
def test_a_rank_that_was_stopped_learns_of_calls_that_were_given_up(env, size):
    ended = run_job(2, PROGRAM, str(CALLS), str(size), env=env, limit=60)
    assert ended.code == 0, ended.text
    assert "did not fail" not in ended.text
    found = {
        words: float(number)
        for words, number in re.findall(r"^(gave up|late|sum) ([\d.]+)$", ended.text, re.M)
    }
    assert found["sum"] == 2.0, ended.text
    assert found["gave up"] < FLUSHES, ended.text
    assert found["late"] < 7.0, ended.text  # while the other one computes
