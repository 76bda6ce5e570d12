"""Spares take the places of dead ranks in groups and meshes, too."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest
from jobs import run_job
from ulfm import only_ulfm

PROGRAM = str(Path(__file__).with_name("spare_groups.py"))
pytestmark = [
    pytest.mark.jobs,
    pytest.mark.rare,
    pytest.mark.slow,
    pytest.mark.deadline(280),
    only_ulfm,
]


def run(*deaths: str, spares: int = 2, **env: str) -> str:
    """Run a job of four ranks and spares; return what it printed."""
    env = {"HPCDIST_FT": "1", "HPCDIST_SPARES": str(spares)} | env
    ended = run_job(4 + spares, PROGRAM, *deaths, env=env, ft=True, limit=100)
    assert not ended.orphans and not ended.shm, (ended.orphans, ended.shm, ended.text)
    return ended.text


def ends(text: str) -> list[list[str]]:
    """Return by rank what it ended with: its size, what its row, all, and it alone have."""
    found = re.findall(r"^end (\d) of (\d) (\w+) (\w+) (\w+)", text, re.MULTILINE)
    return [rest for _, *rest in sorted(found)]


@functools.cache
def wanted() -> list[list[str]]:
    """The ends of the ranks without a death."""
    found = ends(run())
    assert len(found) == 4, found
    return found


@pytest.mark.parametrize("deaths", [("0=2", "3=5", "less"), ("2=joined",)])
def test_a_job_with_groups_ends_as_without_deaths(deaths, tmp_path):
    """A group that a former spare has not made is lost; nothing else is."""
    text = run(*deaths, HPCDIST_TEST_FOLDER=str(tmp_path))
    assert ends(text) == wanted(), text
    assert text.count("has taken the place of rank") == 2, text
    told = "or was a spare and has not made it before its State"
    assert text.count(told) == ("less" in deaths), text


def test_a_rank_dies_while_the_others_wait_for_the_groups_of_a_former_spare():
    """Between nodes, where a former spare may be on another one than its rank was."""
    text = run("1=3", "3=waiting", HPCDIST_NODES="2")
    found = ends(text)
    assert [each[0] for each in found] == ["4"] * 4, text
    assert found[0][1] == found[1][1] != found[2][1] == found[3][1], text
    assert len({each[2] for each in found}) == 1, text
    assert "lost [(1,), (3,)]" in text, text


def test_ranks_close_up_in_their_groups_where_spares_are_missing():
    """The former spare makes its groups in the world of four, and follows the others to three."""
    text = run("1=3", "3=3", spares=1)
    found = ends(text)
    assert [each[0] for each in found] == ["3"] * 3 and "end 3" not in text, text
    # the models of the row whose places are all taken, and of the other one, which lost a rank
    rows = [each[1] for each in found]
    assert rows[:2] == [each[1] for each in wanted()[:2]], text
    assert rows[2] != wanted()[2][1], text
    assert len({each[2] for each in found}) == 1, text


def test_a_former_spare_with_another_model_is_told():
    text = run("1=3", "another")
    says = "rank 1, a former spare, cannot join the others: its State has as 'model' a module with"
    assert text.count(f"ValueError: {says}") >= 4, text
