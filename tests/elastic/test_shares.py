"""Jobs whose batch stays when ranks die: they end bit for bit as without a death."""

from __future__ import annotations

import functools
import random
import re
from pathlib import Path

import pytest
from jobs import run_job
from kill_jobs import differing_with_spares, draw, draw_with_spares, train
from long_form import deadline, size
from ulfm import only_ulfm

PROGRAM = str(Path(__file__).with_name("shares.py"))
pytestmark = [pytest.mark.jobs, pytest.mark.rare]


def ends(np: int, steps: int, *deaths: str, folder: str = "-", ft: str = "1") -> tuple[list, int]:
    """What the parameters and the shares are at the end, and how many ranks were left."""
    ended = run_job(
        np, PROGRAM, str(steps), folder, *deaths, env={"HPCDIST_FT": ft}, ft=True, limit=80
    )
    found = re.search(r"^end (\w+) ranks (\d)", ended.text, re.MULTILINE)
    assert found and not ended.orphans, (ended.orphans, ended.text)
    return [found[1], *re.findall(r"^share .*", ended.text, re.MULTILINE)], int(found[2])


@functools.cache
def wanted() -> list[str]:
    found, ranks = ends(4, 12, ft="")
    assert ranks == 4 and len(found) == 5, found
    return found


@only_ulfm
@pytest.mark.slow
@pytest.mark.deadline(280)
def test_it_ends_as_without_deaths():
    """With what DistributedDataParallel does beside averaging, and with values of each share."""
    assert ends(4, 12, "1=5") == (wanted(), 3)
    assert ends(4, 12, "0=4", "2=8") == (wanted(), 2)


@pytest.mark.slow
@pytest.mark.deadline(280)
def test_the_next_start_keeps_the_shares(tmp_path):
    """With fewer ranks, and with more ranks than shares."""
    folder = str(tmp_path / "commits")
    ends(4, 6, folder=folder, ft="")
    _, ranks = ends(2, 8, folder=folder, ft="")
    assert ranks == 2
    assert ends(5, 12, folder=folder, ft="") == (wanted(), 5)


@only_ulfm
@pytest.mark.slow
@deadline(300, long=3600)
def test_random_deaths(count):
    """Also where spares take the first places, and shares are dealt when none is left."""
    rng, endings = random.Random(), []
    for kind, spares in [("norm", 0), ("zero", 1)] * size(1, 25):
        deaths = draw_with_spares(rng, 2, spares) if spares else draw(rng, 2)
        endings.append(train(kind, deaths, limit=80, spares=spares, keep_batch=True))
        count(1, endings[-1].again)
    assert not differing_with_spares(endings, size(60, 600))


@only_ulfm
def test_the_batch_of_a_later_loop_is_that_of_the_ranks_left():
    """Its first commit comes after a death; and no State beside it may have commits."""
    program = str(Path(__file__).with_name("later_shares.py"))
    ended = run_job(4, program, env={"HPCDIST_FT": "1"}, ft=True, limit=60)
    assert ended.code == 0 and not ended.orphans, (ended.code, ended.orphans, ended.text)
    assert ended.text.count("ended 4 3 [(3,)]") == 3, ended.text
    assert ended.text.count("refused: a program with keep_batch=True has one State") == 3, (
        ended.text
    )
