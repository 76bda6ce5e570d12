"""Deaths while the ranks that are left make their new world."""

import math
from pathlib import Path

import failing
import pytest
from jobs import run_job
from lingering import preloaded, times
from ulfm import only_ulfm

pytestmark = [
    pytest.mark.jobs,
    pytest.mark.rare,
    only_ulfm,
]

PROGRAM = str(Path(__file__).with_name("dies_in_making.py"))


@pytest.mark.parametrize(
    ("call", "number", "spares"),
    [
        ("shrink", 1, 0),
        ("split_type", 1, 0),
        ("dup", 1, 0),
        ("split", 1, 1),
        ("split", 2, 2),
    ],
)
def test_no_rank_revokes_what_another_one_is_still_making(call, number, spares, tmp_path):
    env = {"HPCDIST_FT": "1", "HPCDIST_SPARES": str(spares)} | preloaded(tmp_path, call, number)
    ended = run_job(4 + spares, PROGRAM, env=env, ft=True, limit=60)
    assert ended.code == 0 and not ended.orphans, (ended.code, ended.orphans, ended.text)
    size = 2 + spares
    assert ended.text.count(f"ended {size} [2, 3]") == size, ended.text
    (died,), (left,) = times(ended.text, "dies"), times(ended.text, "leaves")
    revoked = times(ended.text, "revokes")
    assert died < left < min(revoked, default=math.inf), ended.text


def test_what_fails_on_one_rank_alone_is_an_error_on_all(tmp_path):
    """And a communicator that another rank has made is not kept there."""
    program = str(Path(__file__).with_name("fails_in_rebuild.py"))
    env = {"HPCDIST_FT": "1"} | failing.preloaded(tmp_path)
    ended = run_job(3, program, env=env, ft=True, limit=60)
    assert ended.code == 0 and not ended.orphans, (ended.code, ended.orphans, ended.text)
    assert ended.text.count("ended") == 3, ended.text
