"""Groups that are destroyed after the program has finalized MPI itself."""

from __future__ import annotations

from pathlib import Path

import pytest
from jobs import run_job

pytestmark = pytest.mark.jobs

PROGRAM = str(Path(__file__).with_name("finalized.py"))


@pytest.mark.parametrize("nodes", ["1", "2"])
@pytest.mark.parametrize(
    "how", ["nothing", "one by one", "dropped", "destroyed", "queued", "messages", "long messages"]
)
def test_groups_may_be_destroyed_after_mpi_is_finalized(how, nodes, count):
    """It raised DistTimeoutError, and called MPI where a message or a queued call was in flight."""
    env = {"HPCDIST_NODES": nodes}
    ended = run_job(2, PROGRAM, how, env=env)
    assert ended.code == 0, ended.text
    assert ended.text.count(" ends\n") == 2 and "abort" not in ended.text.lower(), ended.text
    assert not ended.orphans and not ended.shm, (ended.orphans, ended.shm, ended.text)
    count(1)
