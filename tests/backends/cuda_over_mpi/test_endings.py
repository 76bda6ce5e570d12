"""How jobs end whose ranks move CUDA tensors over MPI; see test_faults.py, too."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from jobs import run_job
from long_form import LONG

pytestmark = pytest.mark.jobs

PROGRAMS = str(Path(__file__).with_name("endings.py"))


def test_a_rank_that_is_killed_between_two_pieces_is_named(count):
    ended = run_job(3, PROGRAMS, "killed")
    assert ended.code != 0 and not ended.orphans and not ended.shm, ended.text
    assert ended.seconds < (5.0 if LONG else 10.0), (ended.seconds, ended.text)
    says = r"rank 1 (of group .* died|\(pid \d+\) died without leaving)"
    assert re.search(says, ended.text), ended.text
    count(1, ended.seconds)


def test_operations_in_flight_at_the_end_complete():
    ended = run_job(2, PROGRAMS, "outstanding")
    assert ended.code == 0 and not ended.orphans, ended.text
    for rank in range(2):
        assert f"rank {rank} has what it was to get: True" in ended.text, ended.text
    if LONG:
        ended = run_job(2, PROGRAMS, "forgotten")
        assert ended.code != 0 and not ended.orphans, ended.text
        assert "in flight that the other ranks have not joined" in ended.text, ended.text
