"""Stock torch.distributed goes on after the death of ranks, where hpcdist does."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest
from jobs import Ended, run_job
from kill_jobs import differing_with_spares, draw_with_spares, train
from long_form import deadline, size
from ulfm import only_ulfm

pytestmark = [pytest.mark.jobs, pytest.mark.rare]

HERE = Path(__file__).parent


@only_ulfm
@pytest.mark.parametrize("side", ["bridge", "native"])
def test_ddp_goes_on_without_ranks_that_die_and_ends_as_one_process(side: str) -> None:
    ended = run_job(4, str(HERE / "bridge_survivors.py"), side, env={"HPCDIST_FT": "1"}, ft=True)
    assert ended.code == 0 and not ended.orphans, (ended.orphans, ended.text)
    assert ended.text.count("ended") == 2, ended.text


def run(case: str, spares: int = 1, take_over: str = "") -> Ended:
    env = {"HPCDIST_FT": "1", "HPCDIST_SPARES": str(spares), "HPCDIST_TAKE_OVER": take_over}
    ended = run_job(3 + spares, str(HERE / "bridge_spares.py"), case, env=env, ft=True, limit=80)
    assert not ended.orphans, (ended.orphans, ended.text)
    return ended


def ends(text: str) -> list[str]:
    return sorted(re.findall(r"^end (.*)", text, re.MULTILINE))


@only_ulfm
@pytest.mark.slow
@deadline(300, long=3600)
def test_torchs_modules_end_as_without_deaths(count: Any) -> None:
    rng = random.Random()
    kinds = [("torchnorm", 2), ("torchfsdpnorm", 2), ("torchadam", 1)] * size(1, 25)
    endings = [
        train(kind, draw_with_spares(rng, victims, 2), limit=80, spares=2)
        for kind, victims in kinds
    ]
    for ending in endings:
        assert ending.sizes == "4" * len(ending.sizes), ending.text
        count(1, ending.again)
    assert not differing_with_spares(endings, size(60, 600))


@only_ulfm
@pytest.mark.slow
@pytest.mark.deadline(280)
@pytest.mark.parametrize(("start", "taken"), [("mpi", ""), ("native", ""), ("gloo", "gloo,mpi")])
def test_a_former_spare_takes_its_place_in_torchs_default_group(start: str, taken: str) -> None:
    """And the ranks close up when none is left."""
    ended = run(f"calls,{start}", take_over=taken)
    assert ends(ended.text) == ["0/2 6 0", "1/2 6 1"], ended.text
    assert ended.text.count("refused") == ended.text.count(" True") == 9, ended.text
    assert "place 1 3 1" in ended.text, ended.text


@only_ulfm
@pytest.mark.slow
def test_what_a_former_spare_does_not_get_is_an_error_on_all_ranks() -> None:
    ended = run("uncovered,mpi")
    assert ended.text.count("of a DistributedDataParallel is not in the State") >= 3, ended.text


@only_ulfm
@pytest.mark.slow
def test_shards_that_are_lost_are_an_error_on_all_ranks() -> None:
    ended = run("shards,mpi")
    assert ended.text.count("model has a shard on each of 3 ranks, of which 2 are left") >= 2, (
        ended.text
    )


@only_ulfm
def test_backends_of_torchs_own_have_no_spares() -> None:
    ended = run("gloo over mpi", spares=0)
    assert ended.text.count("started") == 3, ended.text
    ended = run("gloo over mpi")
    assert ended.text.count("groups of torch's own backends have no spares") == 4, ended.text


@only_ulfm
def test_what_torch_keeps_is_renewed_once_whatever_signal_handlers_raise() -> None:
    program = str(HERE / "bridge_reconfigurations.py")
    ended = run_job(3, program, env={"HPCDIST_FT": "1"}, ft=True)
    assert ended.code == 0 and ended.text.count("ended") == 3, ended.text
