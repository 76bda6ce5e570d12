"""Groups other than the default one are made again after a death."""

import math
from pathlib import Path

import pytest
from jobs import run_job
from lingering import preloaded, times
from ulfm import only_ulfm

FT = {"HPCDIST_FT": "1"}
HERE = Path(__file__).parent
pytestmark = [
    pytest.mark.jobs,
    pytest.mark.rare,
    only_ulfm,
]


@pytest.mark.parametrize("nodes", ["1", "2"])
def test_groups_of_all_kinds_are_made_again(nodes, count):
    program = str(HERE / "rebuilds.py")
    ended = run_job(6, program, env=FT | {"HPCDIST_NODES": nodes}, ft=True, limit=100)
    assert ended.code == 0 and not ended.orphans, (ended.code, ended.orphans, ended.text)
    assert ended.text.count("ended 4") == 4, ended.text
    told = "is not made again: rank 1 has destroyed it, or dropped all references to it"
    assert ended.text.count(told) == 1, ended.text
    assert not ended.shm, (ended.shm, ended.text)
    count(4)


@pytest.mark.parametrize(
    ("call", "number", "transport"), [("split", 1, "auto"), ("split", 2, "auto"), ("dup", 3, "mpi")]
)
def test_a_rank_that_dies_meanwhile_loses_no_group(call, number, transport, tmp_path):
    program = str(HERE / "dies_in_rebuild.py")
    env = FT | {"HPCDIST_CHECK_TRANSPORT": transport} | preloaded(tmp_path, call, number)
    ended = run_job(4, program, env=env, ft=True, limit=60)
    assert ended.code == 0 and not ended.orphans, (ended.code, ended.orphans, ended.text)
    assert ended.text.count("ended (0, 1) (2, 3)") == 2, ended.text
    (died,), (left,) = times(ended.text, "dies"), times(ended.text, "leaves")
    revoked = times(ended.text, "revokes")
    assert died < left < min(revoked, default=math.inf), ended.text


def test_shards_of_groups_come_back_from_their_neighbours_in_the_group():
    ended = run_job(6, str(HERE / "halves.py"), env=FT, ft=True, limit=60)
    assert ended.code == 0 and not ended.orphans, (ended.code, ended.orphans, ended.text)
    assert ended.text.count("trained in 2") == 4 and ended.text.count("lost") >= 3, ended.text
