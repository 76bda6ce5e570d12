"""Groups that are destroyed after the program has finalized MPI itself."""

from __future__ import annotations

from pathlib import Path

import pytest
from jobs import Ended, run_job

pytestmark = pytest.mark.jobs

PROGRAM = str(Path(__file__).with_name("finalized.py"))


def ends_well(ended: Ended, ranks: int) -> None:
    """Every rank has made all its calls, and nothing of the job is left."""
    assert ended.code == 0, ended.text
    assert ended.text.count(" ends\n") == ranks and "abort" not in ended.text.lower(), ended.text
    assert not ended.orphans and not ended.shm, (ended.orphans, ended.shm, ended.text)


@pytest.mark.parametrize("nodes", ["1", "2"])
@pytest.mark.parametrize(
    "how",
    [
        *("nothing", "one by one", "dropped", "destroyed", "queued", "without the others"),
        *("messages", "long messages"),
    ],
)
def test_groups_may_be_destroyed_after_mpi_is_finalized(how, nodes, count):
    """It raised DistTimeoutError, and called MPI where a message or a queued call was in flight."""
    env = {"HPCDIST_NODES": nodes}
    ends_well(run_job(2, PROGRAM, how, env=env), 2)
    count(1)


@pytest.mark.parametrize("how", ["several lanes", "several lanes, mpi4py imported later"])
def test_mpi_may_be_finalized_while_several_threads_are_in_it(how, count):
    """MPICH stops locking as soon as MPI_Finalize begins: it crashed in the lanes' threads."""
    ends_well(run_job(4, PROGRAM, how, env={"HPCDIST_NODES": "2"}), 4)
    count(1)
