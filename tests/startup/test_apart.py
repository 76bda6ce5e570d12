"""Ranks with PID, user or mount namespaces of their own, or a seccomp filter: all work.

As in a container for each rank. Nothing crashes or hangs, no number is wrong, and no rank is taken
for dead.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from jobs import run_job
from mpis import OPEN_MPI

pytestmark = [pytest.mark.jobs, pytest.mark.rare]

WRAPPER = str(Path(__file__).with_name("apart.py"))
PROGRAM = str(Path(__file__).with_name("apart_ranks.py"))
CONTAINER = "pid+proc+user+ipc+shm+eperm"
#: What the ranks have of their own, and how many of the two then share a node.
CASES = {
    "pid+proc": 2, CONTAINER: 1, "pid": 2, "shm": 1, "eperm": 2, "user": 2, "enosys": 2,
    "pid+shm": 1, "user+eperm": 2,
}  # fmt: skip
#: Where windows are tried, too, which need torch: in mapped memory by ranks that do not see each
#: other, and by messages.
WITH_WINDOWS = ("pid+proc", CONTAINER, "shm")


def can_unshare() -> bool:
    spaces = ["--pid", "--fork", "--mount"] + ["--user", "--map-root-user"] * bool(os.getuid())
    try:
        return subprocess.run(["unshare", *spaces, "true"], capture_output=True).returncode == 0
    except OSError:
        return False


needs_namespaces = pytest.mark.skipif(not can_unshare(), reason="no namespaces may be made here")


def works(what: str, here: int, *more: str, ranks: int = 2) -> None:
    ended = run_job(ranks, WRAPPER, what, PROGRAM, *more, limit=60)
    assert ended.code == 0, ended.text
    found = re.findall(r"rank (\d) right, with (\d) on its node", ended.text)
    assert sorted(found) == [(str(rank), str(here)) for rank in range(ranks)], ended.text
    assert not re.search("died|Signal|Traceback", ended.text), ended.text
    named = "OMPI_MCA_btl=^sm" if OPEN_MPI else "MPIR_CVAR_NOLOCAL=1"
    goes_another_way = here == 1 or (OPEN_MPI and "pid" in what)
    assert ended.text.count(named) == goes_another_way, ended.text


@needs_namespaces
@pytest.mark.parametrize("what", CASES)
def test_ranks_that_are_apart_work(what):
    works(what, CASES[what], *["windows"] * (what in WITH_WINDOWS))


@needs_namespaces
def test_three_ranks_that_are_apart_work():
    works("pid+proc", 3, ranks=3)


@needs_namespaces
@pytest.mark.parametrize("what", ["eperm", "pid+proc"])
def test_a_rank_that_dies_apart_ends_the_job(what):
    ended = run_job(2, WRAPPER, what, PROGRAM, "dies", limit=60)
    assert ended.code != 0, ended.text
    assert not ended.orphans, (ended.orphans, ended.text)
