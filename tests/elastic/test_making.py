"""Deaths while the ranks that are left make their new world."""

import math
from pathlib import Path

import pytest
from jobs import run_job
from lingering import preloaded, times

from hpcdist import _engine

OPEN_MPI = "Open MPI" in _engine.library_version()
pytestmark = [
    pytest.mark.jobs,
    pytest.mark.rare,
    pytest.mark.skipif(not OPEN_MPI, reason="this MPI has no fault tolerance: test_reconfigure.py"),
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
