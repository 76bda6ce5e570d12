"""A rank that dies, or is stopped, where the others move data over two levels: the job ends."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from jobs import Ended, run_job
from patience import patience

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


def end_of(operation: str, how: str, even: bool) -> Ended:
    """Run it on nodes of two ranks, or of two and one: the job has failed, and nothing is left."""
    size, nodes = (4, "0,1,0,1") if even else (3, "0,0,1")
    env = {"HPCDIST_NODES": nodes, "HPCDIST_TWO_LEVEL": "on"}
    ended = run_job(size, PROGRAM, operation, how, env=env, limit=40)
    assert ended.code != 0 and "went on" not in ended.text, ended.text
    assert not ended.orphans and not ended.shm, (ended.orphans, ended.shm, ended.text)
    assert ended.seconds < AT_MOST * patience(), (ended.seconds, ended.text)
    return ended


def are_even(operation: str) -> bool:
    return operation not in ("reduce", "broadcast")


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_rank_that_dies_is_named(operation):
    ended = end_of(operation, "killed", are_even(operation))
    assert re.search(rf"rank 1 \(pid \d+\) died .*{operation} #\d+", ended.text), ended.text


@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_watchdog_ends_what_waits_for_a_stopped_rank(operation):
    ended = end_of(operation, "stopped", are_even(operation))
    assert re.search(rf"{operation} #\d+ of group .* has been moving data", ended.text), ended.text


@pytest.mark.parametrize("how", ["killed", "stopped"])
@pytest.mark.parametrize("operation", ["reduce_scatter_tensor", "all_gather_into_tensor"])
def test_a_rank_whose_block_another_one_carries(operation, how):
    ended = end_of(operation, how, even=False)
    said = {
        "killed": rf"rank 1 \(pid \d+\) died .*{operation} #\d+",
        "stopped": rf"{operation} #\d+ of group .* has been moving data",
    }
    assert re.search(said[how], ended.text), ended.text
