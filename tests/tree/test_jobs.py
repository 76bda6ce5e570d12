"""How the tests start jobs: tests/support/jobs.py."""

from __future__ import annotations

import socket
import subprocess

import jobs
import pytest
from jobs import mpirun_command
from patience import patience
from ports import free_port

pytestmark = [pytest.mark.jobs, pytest.mark.any_mpi]

#: Begins with a pid whose last mpirun, of Open MPI, was killed.
AFTER_A_KILLED_ONE = """
folder="$TMPDIR/ompi.$$"
mkdir -p "$folder"
touch "$folder/pmix.$(uname -n).tool" "$folder/pmix.$(hostname -s).tool"
exec "$@"
"""


def test_a_job_starts_with_the_pid_of_an_mpirun_that_was_killed(tmp_path):
    command, env = mpirun_command(1, {"TMPDIR": str(tmp_path)})
    started = ["sh", "-c", AFTER_A_KILLED_ONE, "sh", *command, "echo", "started"]
    done = subprocess.run(started, env=env, capture_output=True, text=True, timeout=60)
    assert "started" in done.stdout, done.stdout + done.stderr
    assert list(tmp_path.glob("ompi.*/pmix.*")), "it made no such files"


#: As Open MPI's at times: its ranks have ended, and it waits.
WAITING = """#!/bin/sh
[ "$1" = --version ] && exit
while [ "$1" != -n ]; do shift; done
shift 2
"$@"
exec sleep 60
"""


def test_an_mpirun_that_waits_for_no_rank_is_ended(tmp_path, monkeypatch):
    mpirun = tmp_path / "mpirun"
    mpirun.write_text(WAITING)
    mpirun.chmod(0o755)
    monkeypatch.setenv("HPCDIST_TEST_MPIRUN", str(mpirun))
    monkeypatch.setattr(jobs, "ALONE", 0.5)
    rank = "import time; print('rank'); time.sleep(4)"
    ended = jobs.run_job(1, "-c", rank, limit=50)
    assert ended.code, ended
    assert "rank\n" in ended.text, ended
    assert "mpirun waits, and no rank is left" in ended.text, ended
    assert ended.seconds < 30 * patience(), ended


def test_a_free_port_is_none_that_a_connection_gets():
    """One that waits for its server would now and then be connected to itself."""
    port = free_port()
    with socket.create_server(("127.0.0.1", port)) as server:
        for _ in range(20):
            with socket.create_connection(("127.0.0.1", port)) as client:
                server.accept()[0].close()
                assert port < client.getsockname()[1]
