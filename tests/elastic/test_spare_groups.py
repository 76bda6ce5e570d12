"""Spares take the places of dead ranks in groups and meshes, too."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest
from jobs import run_job

from hpcdist import _engine

PROGRAM = str(Path(__file__).with_name("spare_groups.py"))
pytestmark = [
    pytest.mark.jobs,
    pytest.mark.rare,
    pytest.mark.slow,
    pytest.mark.deadline(280),
    pytest.mark.skipif(
        "Open MPI" not in _engine.library_version(), reason="this MPI has no fault tolerance"
    ),
]


def run(*deaths: str, spares: int = 2, **env: str) -> str:
    """Run a job of six ranks and spares; return what it printed."""
    env = {"HPCDIST_FT": "1", "HPCDIST_SPARES": str(spares)} | env
    ended = run_job(6 + spares, PROGRAM, *deaths, env=env, ft=True, limit=100)
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
    assert len(found) == 6, found
    return found


@pytest.mark.parametrize(
    ("deaths", "nodes"),
    [
        (("1=3", "5=6"), "1"),
        (("0=2", "3=2"), "2"),
        (("1=3", "4=waiting"), "1"),
        (("2=joined",), "1"),
    ],
)
def test_a_job_with_groups_ends_as_without_deaths(deaths, nodes, tmp_path):
    text = run(*deaths, HPCDIST_NODES=nodes, HPCDIST_TEST_FOLDER=str(tmp_path))
    assert ends(text) == wanted(), text
    assert text.count("has taken the place of rank") == 2, text


def test_ranks_close_up_in_their_groups_where_spares_are_missing():
    """The former spare makes its groups in the world of six, and follows the others to five."""
    text = run("2=3", "5=3", spares=1)
    found = ends(text)
    assert [each[0] for each in found] == ["5"] * 5 and "end 5" not in text, text
    # the models of the row whose places are all taken, and of the other one, which lost a rank
    rows = [each[1] for each in found]
    assert rows[:3] == [each[1] for each in wanted()[:3]], text
    assert rows[3] == rows[4] != wanted()[3][1], text
    assert len({each[2] for each in found}) == 1, text


def test_a_former_spare_with_another_model_or_a_group_less_is_told():
    text = run("1=3", "another")
    says = "its State has as 'model' a module with"
    assert text.count(f"ValueError: rank 1, a former spare, cannot join the others: {says}") >= 6, (
        text
    )
    text = run("1=3", "less")
    told = "or was a spare and has not made it before its State"
    assert ends(text) == wanted() and text.count(told) == 1, text
