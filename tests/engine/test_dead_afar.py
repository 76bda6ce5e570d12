"""A rank dies out of sight: on another node, or in a PID namespace of its own."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from jobs import run_job
from ulfm import only_ulfm

pytestmark = [pytest.mark.jobs, only_ulfm]


def test_errors_name_a_rank_that_died_on_another_node(count):
    """They were DistBackendError, of messages and windows as of collectives."""
    program = str(Path(__file__).with_name("dead_afar.py"))
    ended = run_job(2, program, env={"HPCDIST_FT": "0", "HPCDIST_NODES": "2"}, ft=True)
    for call in ("get", "put", "recv", "send", "all_reduce"):
        says = rf"^{call}: RankFailedError: rank 1 of group 'world' died: {call}\b"
        assert re.search(says, ended.text, re.MULTILINE), (call, ended.text)
        count(1)
    assert not ended.orphans and not ended.shm, (ended.orphans, ended.shm, ended.text)


def may_unshare() -> bool:
    try:
        return (
            subprocess.run(["unshare", "--pid", "--fork", "true"], capture_output=True).returncode
            == 0
        )
    except OSError:
        return False


@pytest.mark.skipif(not may_unshare(), reason="no namespaces may be made here")
def test_a_rank_that_dies_in_a_container_of_its_own():
    """No process sees the end of another there: MPI has to tell of it."""
    program = str(Path(__file__).with_name("dead_apart.py"))
    # Between such processes Open MPI's own way through memory does not work.
    env = {"HPCDIST_FT": "1", "OMPI_MCA_btl": "^sm"}
    ended = run_job(2, program, env=env, ft=True, limit=60)
    assert re.search(r"^all_reduce: RankFailedError: rank 1 ", ended.text, re.MULTILINE), ended.text
    assert "on with 1" in ended.text, ended.text
