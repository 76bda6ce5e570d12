"""Stock torch.distributed goes on after the death of ranks, where hpcdist does."""

from __future__ import annotations

from pathlib import Path

import pytest
from jobs import run_job

from hpcdist import _engine
from hpcdist.launchers import mpi_family

pytestmark = [pytest.mark.jobs, pytest.mark.rare]

HERE = Path(__file__).parent
OPEN_MPI = mpi_family(_engine.library_version()) == "Open MPI"


only_ulfm = pytest.mark.skipif(not OPEN_MPI, reason="this MPI has no fault tolerance")


@only_ulfm
@pytest.mark.parametrize("side", ["bridge", "native"])
def test_ddp_goes_on_without_ranks_that_die_and_ends_as_one_process(side: str) -> None:
    ended = run_job(4, str(HERE / "bridge_survivors.py"), side, env={"HPCDIST_FT": "1"}, ft=True)
    assert ended.code == 0 and not ended.orphans, (ended.orphans, ended.text)
    assert ended.text.count("ended") == 2, ended.text


@only_ulfm
@pytest.mark.parametrize("first", ["hpcdist.torch", "hpcdist"])
def test_spares_are_refused_on_all_ranks(first: str) -> None:
    """Also where hpcdist has its default group already."""
    program = (
        "import torch.distributed as td, hpcdist, hpcdist.torch\n"
        f"if {first!r} == 'hpcdist': hpcdist.init_process_group()\n"
        "try: td.init_process_group('hpcdist', 'mpi://')\n"
        "except ValueError as error: print(error)\n"
    )
    env = {"HPCDIST_FT": "1", "HPCDIST_SPARES": "1"}
    ended = run_job(3, "-c", program, env=env, ft=True)
    refused = 3 if first == "hpcdist.torch" else 2  # a spare ends in the first call
    assert ended.code == 0 and not ended.orphans, (ended.orphans, ended.text)
    assert ended.text.count("groups of stock torch have no spares") == refused, ended.text


@only_ulfm
def test_what_torch_keeps_is_renewed_once_whatever_signal_handlers_raise() -> None:
    program = str(HERE / "bridge_reconfigurations.py")
    ended = run_job(3, program, env={"HPCDIST_FT": "1"}, ft=True)
    assert ended.code == 0 and ended.text.count("ended") == 3, ended.text
