"""A rank of another node dies, in a job that is not to go on, though MPI could."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from jobs import run_job
from ulfm import only_ulfm

pytestmark = [pytest.mark.jobs, only_ulfm]


def test_errors_name_a_rank_that_died_on_another_node(count):
    """They were DistBackendError, of messages and windows as of collectives."""
    program = str(Path(__file__).with_name("dead_afar.py"))
    ended = run_job(2, program, env={"HPCDIST_FT": "0", "HPCDIST_NODES": "2"}, ft=True)
    for call in ("get", "put", "recv", "send", "all_reduce"):
        says = rf"^{call}: RankFailedError: rank 1 of group 'world' died: {call}\b"
        assert re.search(says, ended.text, re.MULTILINE), (call, ended.text)
        count(1)
    assert not ended.orphans and not ended.shm, (ended.orphans, ended.shm, ended.text)
