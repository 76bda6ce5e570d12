"""What the watchdog says of a call that is late because a rank of the node gets no core."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from jobs import run_job

pytestmark = pytest.mark.jobs


def test_the_watchdog_names_the_rank_that_gets_no_core(count):
    """It said that a peer had died, was stopped, or that the network failed."""
    env = {"HPCDIST_CHECK_TRANSPORT": "mpi"}  # no rank gives up while MPI moves the data
    ended = run_job(2, str(Path(__file__).with_name("starved.py")), env=env)
    assert ended.code != 0, ended.text
    said = re.search(
        r"has been moving data .* got no core, .*"
        r"\. Rank [01] there has waited for a core for ([\d.]+) s of that",
        ended.text,
    )
    assert said, ended.text
    assert float(said[1]) > 0.5, ended.text
    assert not ended.orphans and not ended.shm, (ended.orphans, ended.shm, ended.text)
    count(1)
