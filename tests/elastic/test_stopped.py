"""A rank that is stopped, not dead: it is ended at the timeout, and the others go on without it."""

from pathlib import Path

import pytest
from jobs import run_job
from ulfm import only_ulfm

pytestmark = [
    pytest.mark.jobs,
    pytest.mark.rare,
    only_ulfm,
]

PROGRAM = str(Path(__file__).with_name("stopped.py"))
#: A job of four ranks can lose three.
CASES = [
    ("reduce", "receive", "receive_any"),
    ("reduce_much", "vote", "make_group"),
    ("asynchronous", "reduce_much", "reduce"),
]
APART = {"HPCDIST_CHECK_TRANSPORT": "mpi"}
#: Two ranks on each: one can end the other.
NODES = {"HPCDIST_NODES": "2"}


@pytest.mark.parametrize(
    ("names", "where"),
    [(names, where) for names in CASES for where in ({}, APART)]
    + [((name,), NODES) for name in ("reduce", "reduce_much", "vote")],
    ids=lambda given: given[0] if isinstance(given, tuple) else "".join(given) or "node",
)
def test_the_others_go_on_without_a_rank_that_is_stopped(names, where):
    ended = run_job(4, PROGRAM, *names, env={"HPCDIST_FT": "1"} | where, ft=True, limit=90)
    assert ended.code == 0 and not ended.orphans, (ended.code, ended.orphans, ended.text)
    for left, name in zip((3, 2, 1), names, strict=False):
        assert f"{name}: {left} left" in ended.text, ended.text
        assert ended.text.count(f"rank {left} (pid") == 1, ended.text  # one rank says it
