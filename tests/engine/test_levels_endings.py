"""A rank that dies, or is stopped, where the others move data over two levels: the job ends."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from jobs import Ended, run_job

pytestmark = pytest.mark.jobs

PROGRAM = str(Path(__file__).with_name("levels_ends.py"))
OPERATIONS = [
    "all_reduce",
    "reduce",
    "reduce_scatter_tensor",
    "all_gather_into_tensor",
    "broadcast",
]
#: Seconds: the promise, and more where cores are shared.
AT_MOST = 12.0


def end_of(operation: str, how: str) -> Ended:
    """Run it on nodes of two ranks: the job has failed, and nothing of it is left."""
    size, nodes = (3, "0,0,1") if operation in ("reduce", "broadcast") else (4, "0,1,0,1")
    env = {"HPCDIST_NODES": nodes, "HPCDIST_TWO_LEVEL": "on"}
    ended = run_job(size, PROGRAM, operation, how, env=env, limit=40)
    assert ended.code != 0 and "went on" not in ended.text, ended.text
    assert not ended.orphans and not ended.shm, (ended.orphans, ended.shm, ended.text)
    assert ended.seconds < AT_MOST, (ended.seconds, ended.text)
    return ended


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_rank_that_dies_is_named(operation):
    ended = end_of(operation, "killed")
    assert re.search(rf"rank 1 \(pid \d+\) died .*{operation} #\d+", ended.text), ended.text


@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_watchdog_ends_what_waits_for_a_stopped_rank(operation):
    ended = end_of(operation, "stopped")
    assert re.search(rf"{operation} #\d+ of group .* has been moving data", ended.text), ended.text
