"""RANK, LOCAL_RANK, MASTER_ADDR and the like, for the libraries that read them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from jobs import plain_environment, run_job

from hpcdist import launchers
from hpcdist.launchers.variables import EXPORTED, MASTER, PLACE
from hpcdist.startup import variables

pytestmark = pytest.mark.jobs

STARTS = str(Path(__file__).with_name("starts.py"))


def said(text: str, when: str) -> list[list[str]]:
    """The variables that each of two ranks printed, by rank; - where one was not set."""
    found = sorted(line.split() for line in re.findall(rf"{when}: (.+)$", text, re.M))
    assert len(found) == 2, text
    return found


def check(found: list[list[str]]) -> str:
    """Compare what two ranks of one node say, and return MASTER_PORT."""
    ports = {line.pop() for line in found}
    assert found == [[rank, "2", rank, "2", "0", "127.0.0.1"] for rank in "01"]
    assert len(ports) == 1
    return ports.pop()


def run(*command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command], env=plain_environment(), text=True, timeout=60,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.parametrize("method", ["", "env://"])
def test_the_start_sets_them(method: str) -> None:
    ended = run_job(2, STARTS, "variables", method)
    assert ended.code == 0, ended.text
    assert {*said(ended.text, "before")[0]} == {"-"}
    assert int(check(said(ended.text, "after"))) > 0


def test_the_launch_command_and_spawn_set_them_before() -> None:
    launch = run("-m", "hpcdist", "launch", "-n", "2", STARTS, "variables", "env://")
    for text in (launch, run(STARTS, "variables_of_spawn")):
        assert check(said(text, "before")) == check(said(text, "after"))


def test_what_the_user_has_set_stays_and_what_mpi_contradicts_does_not() -> None:
    env = {"LOCAL_RANK": "0", "MASTER_ADDR": "head", "MASTER_PORT": "4000"}
    ended = run_job(2, STARTS, "variables", env=env)
    lines = said(ended.text, "after")
    assert lines == [[rank, "2", "0", "2", "0", "head", "4000"] for rank in "01"], ended.text
    ended = run_job(2, STARTS, "variables", env={**env, "RANK": "0", "WORLD_SIZE": "8"})
    lines = said(ended.text, "after")
    assert lines == [[rank, "2", rank, "2", "0", "head", "4000"] for rank in "01"], ended.text
    assert ended.text.count("WORLD_SIZE=8 was set and is wrong here: it is now 2") == 2


def test_a_world_of_one_without_a_launcher_sets_nothing() -> None:
    show = "import hpcdist as d, os; b = set(os.environ); d.init_process_group();"
    assert "[]" in run("-c", f"{show} print(sorted(set(os.environ) - b))")


class Comm(SimpleNamespace):
    """A communicator over two nodes, of which this process is rank 2."""

    def all_gather_into_tensor(self, out, mine, api):
        assert list(mine) == [2]
        out[:] = type(out)("q", [0, 0, 2, 2])

    def broadcast(self, data, root, api):
        assert not any(data)
        data[:12] = b"head.org|299"


def test_several_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*PLACE, *MASTER, EXPORTED):
        monkeypatch.setenv(name, "")  # restored afterwards
        monkeypatch.delenv(name)
    monkeypatch.setattr(launchers, "find", lambda: "one")
    variables.export_place(Comm(rank=2, size=4, local_rank=0, node_ranks=(2, 3)), "test")
    values = [os.environ[name] for name in (*PLACE, *MASTER)]
    assert values == ["2", "4", "0", "2", "1", "head.org", "299"]


class First(Comm):
    def all_gather_into_tensor(self, out, mine, api):
        out[:] = type(out)("q", [0, 0, 2, 2])

    def broadcast(self, data, root, api):
        pass


@pytest.mark.parametrize("ours", [True, False])
def test_launchs_loopback_is_no_address_for_several_nodes(monkeypatch, ours):
    """It knew of one node; what the user has set stays."""
    for name in (*PLACE, *MASTER, EXPORTED):
        monkeypatch.setenv(name, "")  # restored afterwards
        monkeypatch.delenv(name)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "299")
    if ours:
        monkeypatch.setenv(EXPORTED, "MASTER_ADDR=127.0.0.1,MASTER_PORT=299")
    monkeypatch.setattr(launchers, "find", lambda: "one")
    monkeypatch.setattr(variables.socket, "gethostname", lambda: "head")
    variables.export_place(First(rank=0, size=4, local_rank=0, node_ranks=(0, 1)), "test")
    assert os.environ["MASTER_ADDR"] == ("head" if ours else "127.0.0.1")
