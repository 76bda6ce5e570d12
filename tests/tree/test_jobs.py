"""How the tests start jobs: tests/support/jobs.py."""

from __future__ import annotations

import subprocess

import pytest
from jobs import mpirun_command

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
