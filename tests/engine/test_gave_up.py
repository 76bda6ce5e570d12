"""A rank that gives up and ends is not to blame: the others name the rank that is late."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from jobs import run_job

pytestmark = pytest.mark.jobs

PROGRAMS = str(Path(__file__).with_name("gave_up.py"))
#: How the ranks agree: on a node's page, between two nodes, through MPI on one node.
TRANSPORTS = {
    "page": {},
    "nodes": {"HPCDIST_NODES": "2"},
    "messages": {"HPCDIST_CHECK_TRANSPORT": "mpi"},
}


def said(np: int, program: str, folder: Path, env: dict[str, str]) -> dict[int, str]:
    """Run a program; what the calls of the ranks between the first and the last ended with."""
    text = run_job(np, PROGRAMS, program, str(folder), env=env, limit=40).text
    found = {int(rank): error for rank, error in re.findall(r"^rank (\d+): (.*)", text, re.M)}
    assert found.keys() >= set(range(1, np - 1)), text
    return found


@pytest.mark.parametrize(("program", "np"), [("waits", 3), ("comes", 4)])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_late_rank_is_named(transport, program, np, tmp_path):
    errors = said(np, program, tmp_path, TRANSPORTS[transport])
    for rank in range(1, np - 1):
        error, late = errors[rank], np - 1
        assert error.startswith("DistTimeoutError: "), (rank, error)
        assert re.search(r"rank 0 gave up after \d", error), (rank, error)
        named = rf"waiting for rank [\d, ]*\b{late}|ranks? [\d, ]*\b{late} ha(s|ve) not joined"
        assert re.search(named, error), (rank, error)
        if program == "comes" and (transport != "nodes" or rank == 1):
            assert "meanwhile rank 0 has left the job" in error, (rank, error)
            assert "can still be used" not in error, (rank, error)


def test_a_rank_that_waits_for_a_message_learns_why_none_comes(tmp_path):
    error = said(3, "receives", tmp_path, {})[1]
    assert error.startswith("RankFailedError: rank 0 of group 'world' failed (unhandled"), error
    assert "DistTimeoutError" in error and "has not joined" in error, error


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_rank_that_left_is_named_on_all_nodes(transport, tmp_path):
    errors = said(4, "leaves", tmp_path, TRANSPORTS[transport])
    for rank in range(1, 4):
        assert errors[rank].startswith("RankFailedError: "), (rank, errors[rank])
        assert re.search(r"rank 0( of group 'world')? has left the job", errors[rank]), errors


@pytest.mark.parametrize("transport", ["nodes", "messages"])
def test_a_rank_that_destroys_the_group_is_named_once(transport, tmp_path):
    """Its error began: rank 0 gave up after 1 s because rank 0 of group ... has destroyed it."""
    error = said(3, "destroys", tmp_path, TRANSPORTS[transport])[1]
    assert error.startswith("DistMismatchError: "), error
    assert re.search(r"rank 0 gave up after .* because it has destroyed group", error), error
    assert error.count("rank 0") == 1, error
