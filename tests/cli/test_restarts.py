"""Where a job that failed is started again, and what its status means."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from hpcdist.cli import main, restarts
from hpcdist.cli.restarts import Pool, lost_a_rank
from hpcdist.elastic.memory import Memory
from hpcdist.launchers.commands import Hydra, Srun
from hpcdist.startup.commits import folder_of_job

pytestmark = [pytest.mark.local, pytest.mark.any_mpi]


def test_a_killed_rank_costs_a_slot_of_the_machine():
    pool = Pool(4, 1)
    assert pool.now() == (4, ())
    sizes = []
    for lost in (False, True, True, True, True, True):
        pool.shrink(lost, [])
        sizes.append(pool.now()[0])
    assert sizes == [4, 4, 3, 2, 1, 0]


def test_hosts_that_are_gone_are_left_out():
    pool = Pool(4, 1, ["a", "b", "c"])
    assert pool.now() == (4, ("a", "b"))
    pool.shrink(True, [])
    assert pool.now() == (4, ("a", "b"))
    pool.shrink(True, ["a"])
    assert pool.now() == (4, ("b", "c"))
    pool.shrink(True, ["c"])
    assert pool.now() == (2, ("b",))
    pool.shrink(True, ["b"])
    assert pool.now()[0] == 0


@pytest.mark.parametrize(
    ("status", "lost"), [(71, True), (137, True), (9, True), (1, False), (3, False)]
)
def test_what_a_status_says(status, lost):
    assert lost_a_rank(status) is lost


def test_nodes_of_slurm_that_are_down(monkeypatch):
    said = "a idle\nb down*\nc mixed\nd allocated\ne drained\n"
    monkeypatch.setattr(restarts, "_ask", lambda command: said)
    assert restarts._dead(list("abcdef"), Srun("/bin/srun", "pmix")) == ["b", "e"]
    assert restarts.hosts_of_allocation({"SLURM_JOB_NODELIST": "x"}) == said.split()
    monkeypatch.setattr(restarts, "_ask", lambda command: None)
    assert restarts._dead(["a"], Srun("/bin/srun", "pmix")) == []
    assert restarts.hosts_of_allocation({}) == []


def test_hosts_that_ssh_cannot_reach(monkeypatch, tmp_path):
    ssh = tmp_path / "ssh"
    ssh.write_text(
        '#!/bin/sh\ncase "$*" in\n*good*) exit 3;;\n'
        # one that shares its connection, and keeps the pipes
        f"*kept*) sleep 60 & echo $! > {tmp_path}/left; exit 0;;\nesac\nexit 255\n"
    )
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert restarts._dead(["good", "bad", "kept", "localhost"], Hydra("/bin/run")) == ["bad"]
    os.kill(int((tmp_path / "left").read_text()), signal.SIGTERM)
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    assert restarts._dead(["good", "bad"], Hydra("/bin/run")) == []


def test_how_a_job_ended_where_its_status_does_not_say_it(monkeypatch, tmp_path):
    """Its folder tells: of this machine if a rank ran here, else of the first host."""
    ssh = tmp_path / "ssh"
    ssh.write_text('#!/bin/sh\n[ "$5" = there ] && shift 5 && exec sh -c "$*"\nexit 255\n')
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    folder = tmp_path / "it's left"
    monkeypatch.setattr(restarts, "folder_of_job", lambda job: folder)
    places = [], ["there", "localhost"], ["there"], ["lost"]
    assert [restarts._left("job", place) for place in places] == [False] * 4
    folder.mkdir()
    assert [restarts._left("job", place) for place in places] == [True, True, True, False]
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    assert not restarts._left("job", ["there"])


def test_a_job_that_fails_after_its_ranks_ended_well_is_started_again(capfd):
    """The last rank removes the node's folder; then a library's destructor crashes, for example."""
    ends = "import os, sys, shutil; shutil.rmtree(sys.argv[1]); sys.exit(3)"
    tried = []

    def build(ranks, hosts, env):
        folder = folder_of_job(env["HPCDIST_COMMIT_JOB"])
        tried.append((folder, (folder / "lock").exists()))
        return [sys.executable, "-c", ends, str(folder)], dict(env)

    assert restarts.supervise(Pool(1, 0), 2, Hydra("run"), build) == 3
    assert len(tried) == 3 and all(there for _, there in tried)
    assert "it was started again 2 times" in capfd.readouterr().err
    assert not tried[0][0].exists()


_JOB = """
import signal, sys
from hpcdist.cli import restarts
from hpcdist.launchers.commands import Hydra

for number in (signal.SIGCHLD, signal.SIGHUP, signal.SIGINT):
    signal.signal(number, signal.SIG_IGN)
folder = sys.argv[1]
tries = f"echo >> {folder}/tries; while [ ! -e {folder}/go ]; do sleep 0.05; done; exit 3"
build = lambda ranks, hosts, env: (["/bin/sh", "-c", tries], dict(env))
sys.exit(restarts.supervise(restarts.Pool(1, 0), 1, Hydra("run"), build))
"""


def test_signals_that_are_to_be_ignored_change_nothing(tmp_path):
    """Under nohup, and in the background of a script; some services ignore SIGCHLD."""
    job = subprocess.Popen([sys.executable, "-P", "-c", _JOB, str(tmp_path)])
    end = time.monotonic() + 60
    while not (tmp_path / "tries").exists() and time.monotonic() < end:
        time.sleep(0.05)
    for number in (signal.SIGHUP, signal.SIGINT):
        job.send_signal(number)
    (tmp_path / "go").touch()
    assert job.wait(60) == 3
    assert (tmp_path / "tries").read_text() == "\n\n"


def test_cleaning_a_folder_that_is_gone():
    here = Memory(f"{os.getpid()}-gone")
    here.remove()
    here.clean()
    here.close()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--standby", "1"], "--standby needs --max-restarts"),
        (
            ["--standby", "2", "--max-restarts", "1", "--hosts", "a,b"],
            "none of the 2 hosts is left",
        ),
        (["--max-restarts", "1", "--hosts", "a,b,c"], "4 ranks cannot be divided among 3 hosts"),
    ],
)
def test_options_that_contradict(options, said, capfd):
    assert main(["launch", "-n", "4", *options, __file__]) == 2
    assert said in capfd.readouterr().err


def test_a_setting_that_makes_no_sense(monkeypatch, capfd):
    monkeypatch.setenv("HPCDIST_FT", "maybe")
    assert main(["launch", "-n", "4", __file__]) == 2
    assert "hpcdist launch: HPCDIST_FT='maybe' is not valid" in capfd.readouterr().err
