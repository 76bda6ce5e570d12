"""Start a job under the mpirun that tests/run.py uses, with a time limit, and see how it ended."""

from __future__ import annotations

import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from patience import patience

#: When the running test's deadline passes, of ``time.monotonic``; conftest.py sets it.
until = math.inf
#: Seconds before it at which a job is ended, so that the test can still show what it printed.
SPARE = 12.0
#: Seconds for which mpirun may take to see that no rank is left.
ALONE = 15.0


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
    orphans : list of str
        Command lines of the job's processes that were still there two seconds later, or more where
        cores are shared.
    shm : list of str
        Files that the job left in shared memory, of those it said it uses by ``shm NAME`` lines.
    """

    code: int
    text: str
    seconds: float
    orphans: list[str] = field(default_factory=list)
    shm: list[str] = field(default_factory=list)


def _marked(marker: str) -> list[str]:
    """Command lines of the processes that a job has left running."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if marker.encode() in (process / "environ").read_bytes():
                command = (process / "cmdline").read_bytes().replace(b"\0", b" ")
                state = (process / "stat").read_text().rpartition(")")[2].split()[0]
                if state != "Z":  # a zombie is its parent's affair: a container may have no init
                    found.append(command.decode(errors="replace"))
        except OSError:
            continue  # it has gone, or is another user's
    return found


def _ranks(marker: str) -> list[str]:
    return [line for line in _marked(marker) if line.startswith(sys.executable)]


def _output(job: subprocess.Popen[str], marker: str, limit: float) -> str:
    """Return what a job prints until it ends.

    Raises subprocess.TimeoutExpired if it takes too long, or if mpirun waits for no rank.
    """
    end, seen, gone = time.monotonic() + limit, False, math.inf
    while True:
        try:
            return job.communicate(timeout=max(min(end - time.monotonic(), 3.0), 0.0))[0]
        except subprocess.TimeoutExpired:
            now, ranks = time.monotonic(), _ranks(marker)
            gone = math.inf if ranks else min(gone, now)
            seen = seen or bool(ranks)
            if now >= end or (seen and now - gone > ALONE * patience()):
                raise


def mapped_shm() -> set[str]:
    """Names of the files of shared memory that this process has mapped, unlinked or not."""
    found = re.findall(r" /dev/shm/(\S+)", Path("/proc/self/maps").read_text())
    return set(found)


#: How the names of the variables begin that a launcher sets for its processes.
_LAUNCHER = (
    "OMPI_", "PMI", "SLURM", "TORCHELASTIC", "RANK", "WORLD", "MASTER", "LOCAL_", "MPI_LOCAL",
)  # fmt: skip


def plain_environment(**more: str) -> dict[str, str]:
    """Return the environment without a launcher's variables, for a process of one thread."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHER)}
    return {**own, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **more}


def find_mpirun() -> str:
    """Return the mpirun that tests/run.py names, that beside this Python, or that on PATH."""
    beside = Path(sys.executable).parent / "mpirun"
    found = os.environ.get("HPCDIST_TEST_MPIRUN") or (
        str(beside) if beside.exists() else shutil.which("mpirun")
    )
    assert found, "no mpirun beside this Python and none on PATH"
    return found


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    """Where the jobs of this process have their folders."""
    return tempfile.TemporaryDirectory(prefix="hpcdist-jobs.", ignore_cleanup_errors=True)


def own_files(folder: str) -> dict[str, str]:
    """Return the environment in which Open MPI's mpirun has its files in a folder of its own.

    By default they are in /tmp/ompi.PID. An mpirun that was killed leaves them there, and the next
    one that gets that pid does not start: "The PMIx server's listener thread failed to start".
    """
    return {"PRTE_MCA_prte_tmpdir_base": folder}


def mpirun_command(
    np: int, env: dict[str, str] | None = None, ft: bool = False
) -> tuple[list[str], dict[str, str]]:
    """Return ``mpirun -n np`` with what it needs here, and the environment to start it in.

    With `ft` the job goes on without a rank that dies, where MPI can.
    """
    mpirun = find_mpirun()
    arguments: list[str] = []
    # Intel's mpirun is a script that looks for its parts on PATH.
    full = {**os.environ, "PATH": f"{Path(mpirun).parent}{os.pathsep}{os.environ['PATH']}"}
    full |= {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **(env or {})}
    version = subprocess.run(
        [mpirun, "--version"], capture_output=True, text=True, timeout=60, env=full
    )
    if "Intel(R) MPI" in version.stdout:
        full |= {"I_MPI_PIN": "off"}  # it ignores -bind-to none
    elif "HYDRA" not in version.stdout.upper():
        arguments = ["--oversubscribe", "--bind-to", "none", *(["--with-ft", "ulfm"] * ft)]
        full |= own_files(tempfile.mkdtemp(dir=_folder().name))
        if os.getuid() == 0:
            full |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return [mpirun, *arguments, "-n", str(np)], full


def run_job(
    np: int,
    *command: str,
    limit: float = math.inf,
    env: dict[str, str] | None = None,
    ft: bool = False,
) -> Ended:
    """Run ``mpirun -n np python command...`` and wait for its end.

    Parameters
    ----------
    np : int
        Ranks.
    *command : str
        The program and its arguments.
    limit : float
        Seconds, more where cores are shared, at most until shortly before the test's deadline; a
        job that takes longer is killed and the test fails with what it printed. An mpirun that
        waits although no rank is left is killed, too, but is no failure of the job's: the code
        tells (docs/sharp-bits.md has what Open MPI's waits for).
    env : dict, optional
        Added to the environment.
    ft : bool
        Let the job go on without a rank that dies, with an MPI that can.
    """
    mpirun, full = mpirun_command(np, env, ft)
    marker = f"HPCDIST_TEST_JOB={uuid.uuid4()}"
    full["HPCDIST_TEST_JOB"] = marker.partition("=")[2]
    limit = max(min(limit * patience(), until - SPARE - time.monotonic()), 1.0)
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
        text = _output(job, marker, limit)
    except subprocess.TimeoutExpired:
        ranks = _ranks(marker)
        job.send_signal(signal.SIGTERM)
        try:
            text, _ = job.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            os.killpg(job.pid, signal.SIGKILL)
            text, _ = job.communicate()
        late = f"the job did not end within {time.time() - began:.0f} s"
        if ranks:
            raise AssertionError(f"{late}; it printed:\n{text}") from None
        text += f"\n{late}: mpirun waits, and no rank is left"
    ended = time.time()
    own = re.search(r"^began ([0-9.]+)$", text, re.MULTILINE)
    orphans = _marked(marker)
    while orphans and time.time() < ended + 2 * patience():
        time.sleep(0.05)
        orphans = _marked(marker)
    used = set(re.findall(r"^shm (\S+)$", text, re.MULTILINE))
    shm = sorted(name for name in used if Path("/dev/shm", name).exists())
    if job.returncode != 0:  # the flight recorders of a job that failed stay for their reader
        for name in [name for name in shm if name.startswith("hpcdist.")]:
            shm.remove(name)
            Path("/dev/shm", name).unlink(missing_ok=True)
    return Ended(job.returncode, text, ended - (float(own[1]) if own else began), orphans, shm)
