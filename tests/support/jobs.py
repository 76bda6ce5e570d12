"""Start a job under the mpirun that tests/run.py uses, with a time limit, and see how it ended."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path


@dataclass
class Ended:
    """How a job ended.

    Attributes
    ----------
    code : int
        Exit status of mpirun.
    text : str
        What all ranks printed, standard error included.
    seconds : float
        From the program's own ``began <time>`` line, if it printed one, to mpirun's end; else from
        mpirun's start.
    """

    code: int
    text: str
    seconds: float


def find_mpirun() -> str:
    """Return the mpirun that tests/run.py names, that beside this Python, or that on PATH."""
    beside = Path(sys.executable).parent / "mpirun"
    found = os.environ.get("HPCDIST_TEST_MPIRUN") or (
        str(beside) if beside.exists() else shutil.which("mpirun")
    )
    assert found, "no mpirun beside this Python and none on PATH"
    return found


def mpirun_command(np: int, env: dict[str, str] | None = None) -> tuple[list[str], dict[str, str]]:
    """Return ``mpirun -n np`` with what it needs here, and the environment to start it in."""
    mpirun = find_mpirun()
    arguments: list[str] = []
    full = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **(env or {})}
    version = subprocess.run([mpirun, "--version"], capture_output=True, text=True, timeout=60)
    if "HYDRA" not in version.stdout.upper():
        arguments = ["--oversubscribe", "--bind-to", "none"]
        if os.getuid() == 0:
            full |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return [mpirun, *arguments, "-n", str(np)], full


def run_job(
    np: int, *command: str, limit: float = 60.0, env: dict[str, str] | None = None
) -> Ended:
    """Run ``mpirun -n np python command...`` and wait for its end.

    Parameters
    ----------
    np : int
        Ranks.
    *command : str
        The program and its arguments.
    limit : float
        Seconds; a job that takes longer is killed and the test fails with what it printed.
    env : dict, optional
        Added to the environment.
    """
    mpirun, full = mpirun_command(np, env)
    began = time.time()
    job = subprocess.Popen(
        [*mpirun, sys.executable, *command],
        env=full,
        text=True,
        errors="replace",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        text, _ = job.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        job.send_signal(signal.SIGTERM)
        try:
            text, _ = job.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            os.killpg(job.pid, signal.SIGKILL)
            text, _ = job.communicate()
        raise AssertionError(
            f"the job did not end within {limit:g} s; it printed:\n{text}"
        ) from None
    own = re.search(r"^began ([0-9.]+)$", text, re.MULTILINE)
    return Ended(job.returncode, text, time.time() - (float(own[1]) if own else began))
