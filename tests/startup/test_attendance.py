"""A start that a rank does not reach ends in time, and says who is missing."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from jobs import mpirun_command, run_job
from mpis import OPEN_MPI
from patience import patience

from hpcdist import launchers
from hpcdist.startup import apart, attendance
from hpcdist.startup.attendance import Arrived, Watch

pytestmark = pytest.mark.jobs

PROGRAMS = str(Path(__file__).with_name("absences.py"))
#: Seconds: the start's timeout in the programs, and what the launcher and a busy machine add.
LIMIT, SLACK = 3.0, 8.0


def test_a_rank_that_never_comes_is_named():
    ended = run_job(3, PROGRAMS, "absent")
    assert ended.code != 0, ended.text
    assert ended.seconds < LIMIT + SLACK * patience(), (ended.seconds, ended.text)
    assert "init_process_group: timeout after" in ended.text, ended.text
    assert "rank 1 has not called it" in ended.text, ended.text
    assert not ended.orphans, ended.text


@pytest.mark.parametrize(
    ("program", "says"),
    [
        ("raises", "ValueError: boom"),
        ("exits", ""),
        # of hpcdist's, or of Open MPI's launcher where that is faster
        ("leaves", r"rank 1 has ended before it called|process rank 1 .*exiting\s+improperly"),
    ],
)
def test_a_rank_that_ends_before_it_comes_ends_the_job(program, says):
    ended = run_job(3, PROGRAMS, program)
    assert ended.code != 0, ended.text
    assert ended.seconds < LIMIT + SLACK * patience(), (ended.seconds, ended.text)
    assert re.search(says, ended.text), ended.text
    assert not ended.orphans, ended.text


@pytest.mark.parametrize("namespace", [False, True], ids=["seen", "own namespace"])
def test_a_rank_ends_itself_when_its_launcher_has_gone(namespace, tmp_path):
    lock = tmp_path / "lock"
    lock.touch()
    mpirun, env = mpirun_command(2, {"TEST_LOCK": str(lock)})
    apart = ["unshare", "--pid", "--fork"] if namespace else []
    if namespace and os.getuid():
        apart += ["--user", "--map-root-user"]
    job = subprocess.Popen(
        [*mpirun, *apart, sys.executable, PROGRAMS, "without_launcher"],
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert job.stdout is not None
    assert any(line.startswith(b"here") for line in job.stdout)
    time.sleep(2)  # into MPI_Init
    # MPICH's mpirun has a process on each node, which then has no time to end its ranks.
    children = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
    for pid in map(int, children):
        if Path(f"/proc/{pid}/comm").read_text().startswith("hydra"):
            os.kill(pid, signal.SIGKILL)
            break
    else:
        job.kill()
    with open(lock) as held:
        until = time.monotonic() + 10
        while True:
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                assert time.monotonic() < until, "the rank is still there"
                time.sleep(0.1)
    job.kill()
    job.wait()


@pytest.mark.parametrize("program", ["again", "mpi_is_up"])
def test_where_mpi_is_up_a_rank_that_does_not_come_is_an_error(program):
    ended = run_job(3, PROGRAMS, program)
    assert ended.code == 0, ended.text
    said = re.findall(r"after ([0-9.]+) s: DistTimeoutError: timeout after (.*)", ended.text)
    assert len(said) == 2, ended.text
    for seconds, text in said:
        assert LIMIT - 0.2 < float(seconds) < LIMIT + 2, ended.text
        # on a busy machine another rank may be as late
        assert re.search(r"ranks? ([02], )?1(, [02])? ha(s|ve) not called it", text), ended.text
    assert ended.text.count("up with 3") == 3, ended.text


def test_a_child_that_starts_a_group_is_told_or_is_a_world_of_one():
    """Open MPI would wait for ever in it. Under MPICH the child is no rank of the job: the RANK and
    WORLD_SIZE that hpcdist has set for the rank are not its own.
    """
    ended = run_job(2, PROGRAMS, "child")
    assert ended.code == 0, ended.text
    told = re.search(r"child ended with (-?\d+) after ([0-9.]+) s", ended.text)
    assert told and float(told[2]) < LIMIT + SLACK * patience(), ended.text
    if OPEN_MPI:
        assert int(told[1]) != 0, ended.text
        assert "another process has started MPI as rank 1 of this job" in ended.text, ended.text
    else:
        assert int(told[1]) == 0, ended.text
        assert "rank 0 of 1" in ended.text, ended.text
    assert ended.text.count("went on") == 2, ended.text


def test_a_tool_of_a_rank_may_fail():
    ended = run_job(2, PROGRAMS, "failing_tool")
    assert ended.code == 0, ended.text
    assert ended.text.count("went on") == 2, ended.text


def test_python_finds_no_socket_left_open():
    ended = run_job(2, PROGRAMS, "nothing_left_open", env={"PYTHONWARNINGS": "always"})
    assert ended.code == 0, ended.text
    assert ended.text.count("went on") == 2, ended.text
    assert "ResourceWarning" not in ended.text, ended.text


@pytest.mark.parametrize(
    ("local_size", "here", "says"),
    [
        (2, "one", False),
        (2, "two", True),
        (2, "many", False),
        (2, "first of two nodes", False),
        (1, "two", False),
    ],
)
def test_ranks_with_a_dev_shm_each_are_told_if_they_are_those_of_one_node(
    monkeypatch, local_size, here, says
):
    """Not while some are missing, nor where more nodes show in one network namespace."""
    first, second = Arrived("0", ("p", "a")), Arrived("1", ("p", "b"))
    ranks = {
        "one": {0: first},
        "two": {2: first, 3: second},
        "many": {0: first, 1: second, 2: Arrived("0", ("p", "c"))},
        "first of two nodes": {0: first, 2: Arrived("0", ("p", "c"))},
    }
    monkeypatch.delenv("MPIR_CVAR_NOLOCAL", raising=False)
    monkeypatch.setattr(launchers, "mpi_family", lambda version: "MPICH")
    watch = Watch(5)
    watch._launch = launchers.Launch("mpirun", 0, 4, 0, local_size)
    watch._here = lambda: ranks[here]
    assert watch._waits_for_ever() == says


def test_names_that_are_no_text_are_read(monkeypatch):
    """The kernel cuts a script's name after 15 bytes, and anyone's socket may have any bytes."""
    own = Path("/proc/self/comm")
    before = own.read_bytes()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        other.bind(f"\0hpcdist test {os.getpid()} ".encode() + b"\xd0")
        try:
            own.write_bytes("обучение".encode()[:15])
            assert apart.comm_of(os.getpid()).startswith("обучени")
            assert apart.stat_of("self")[1] == str(os.getppid())
            attendance._rank_of("self")
            assert Watch(5)._here() == {}
            monkeypatch.setattr(attendance, "_claim", None)
            monkeypatch.setattr(attendance, "_bind", lambda name: None)
            attendance._claim_rank("none", 0)
        finally:
            own.write_bytes(before.strip())


def test_a_script_that_is_called_like_a_launcher_is_none(tmp_path):
    """Such a wrapper is the parent of each rank, and has no other child."""
    script = tmp_path / "mpirun_env.sh"
    program = (
        "from hpcdist.startup import attendance as a, apart; import os;"
        "print(apart.comm_of(os.getppid()).strip(), a._ancestor(('mpirun_env',)),"
        "apart.is_launcher(os.getppid(), a._PARENTS))"
    )
    script.write_text(f'#!/bin/sh\n{sys.executable} -c "{program}"\nexit $?\n')
    script.chmod(0o755)
    done = subprocess.run([script], capture_output=True, text=True, timeout=60)
    assert done.stdout == "mpirun_env.sh None False\n", (done.stdout, done.stderr)


@pytest.mark.parametrize(
    ("children", "found"),
    [
        ({"1": 0, "2": 1}, None),
        ({"1": 0}, [1]),
        ({"1": "train: epoch 3", "2": 1}, None),
        ({"1": "train: epoch 3"}, []),
        ({"1": 0, "2": None}, [1]),
    ],
)
def test_a_rank_that_shows_its_title_alone_has_not_ended(children, found, monkeypatch, tmp_path):
    """setproctitle writes over the variables by which a rank is known."""
    for pid, what in children.items():
        (tmp_path / pid).mkdir()
        (tmp_path / pid / "stat").write_text(f"{pid} (python) S 1")
        shown = what if isinstance(what, str) else "HOME=/\0"
        shown += f"PMI_RANK={what}\0" if isinstance(what, int) else "\0\0"
        (tmp_path / pid / "environ").write_text(shown)
    path = Path
    fake = lambda name: path(name.replace("/proc", str(tmp_path)))  # noqa: E731
    monkeypatch.setattr(attendance, "Path", fake)
    monkeypatch.setattr(apart, "Path", fake)
    monkeypatch.setattr(apart, "is_launcher", lambda pid, names: True)
    monkeypatch.setattr(attendance, "_children", lambda pid: list(children))
    monkeypatch.setattr(os, "getpid", lambda: 1)
    watch = Watch.__new__(Watch)
    watch._launch = launchers.Launch("mpirun", 0, 2, 0, 2)
    assert watch._ended() == found
