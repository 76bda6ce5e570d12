"""Stock torch.distributed goes on after the death of ranks, where hpcdist does."""

from __future__ import annotations

from pathlib import Path

import pytest
from jobs import run_job

from hpcdist import _engine
from hpcdist.launchers import mpi_family

pytestmark = [pytest.mark.jobs, pytest.mark.rare]

PROGRAM = str(Path(__file__).with_name("bridge_survivors.py"))
OPEN_MPI = mpi_family(_engine.library_version()) == "Open MPI"


@pytest.mark.skipif(not OPEN_MPI, reason="this MPI has no fault tolerance")
@pytest.mark.parametrize("side", ["bridge", "native"])
def test_ddp_goes_on_without_ranks_that_die_and_ends_as_one_process(side: str) -> None:
    ended = run_job(4, PROGRAM, side, env={"HPCDIST_FT": "1"}, ft=True)
    assert ended.code == 0 and not ended.orphans, (ended.orphans, ended.text)
    assert ended.text.count("ended") == 2, ended.text
