"""A Slurm cluster with two virtual nodes for the tests, and jobs on it."""

from __future__ import annotations

import contextlib
import ctypes.util
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from jobs import Ended, find_mpirun
from patience import patience
from places import ROOT

CLUSTER = str(ROOT / "jobscripts" / "ci" / "slurm-cluster")
#: Begins the reason of every skip where there is no Slurm; tests/conftest.py counts them by it.
ABSENT = "slurm: "


def plugins() -> tuple[tuple[str, ...], dict[str, str]]:
    """Return srun's plugins for the MPI that is tested, and what they need in the environment.

    pmix for Open MPI, pmi2 for MPICH, and both for Intel MPI, which has to be told Slurm's library.
    """
    mpirun = find_mpirun()
    # Intel's is a script that looks for its parts on PATH.
    path = {"PATH": f"{Path(mpirun).parent}{os.pathsep}{os.environ['PATH']}"}
    text = subprocess.run(
        [mpirun, "--version"], capture_output=True, text=True, timeout=60, env=os.environ | path
    ).stdout
    if "Intel(R) MPI" in text:
        library = ctypes.util.find_library("pmi2")
        assert library, "no libpmi2, which Intel MPI needs under srun: apt-get install libpmi2-0"
        return ("pmi2", "pmix"), {"I_MPI_PMI_LIBRARY": library, "I_MPI_PIN": "off"}
    return ("pmi2" if "HYDRA" in text.upper() else "pmix",), {}


def require() -> None:
    """Skip the test where no cluster can be started; fail it where CI promises one."""
    checked = subprocess.run([CLUSTER, "check"], capture_output=True, text=True, timeout=60)
    if checked.returncode:
        why = checked.stderr.strip().removeprefix("slurm-cluster: ")
        if os.environ.get("CI") == "true":
            pytest.fail(f"CI=true, so a Slurm cluster has to start here: {why}")
        pytest.skip(ABSENT + why)


class Cluster:
    """A cluster that is up.

    Parameters
    ----------
    folder : pathlib.Path
        Its state.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.plugins, needed = plugins()
        self.plugin = self.plugins[0]
        unwanted = ("OMPI_", "PMI", "PMIX_", "PRTE_", "SLURM_", "HPCDIST_TEST", "OMP_NUM_THREADS")
        self.env = {k: v for k, v in os.environ.items() if not k.startswith(unwanted)}
        self.env["PATH"] = f"{Path(find_mpirun()).parent}:{self.env['PATH']}"
        self.env |= {"PYTHONUNBUFFERED": "1", **needed}
        if os.getuid() == 0:
            self.env |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}

    def command(
        self, *command: str, limit: float = 60.0, env: dict[str, str] | None = None
    ) -> Ended:
        """Run one of Slurm's commands, and see how it ended.

        Parameters
        ----------
        *command : str
            The command and its arguments.
        limit : float
            Seconds; after them it is ended, with its jobs, and the test fails.
        env : dict, optional
            Added to the environment.
        """
        began = time.time()
        full = [CLUSTER, "run", "--dir", str(self.folder), "--", *command]
        job = subprocess.Popen(
            full,
            env=self.env | (env or {}),
            cwd=self.folder,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        try:
            text, _ = job.communicate(timeout=limit * patience())
        except subprocess.TimeoutExpired:
            job.kill()
            self.cancel()
            text, _ = job.communicate()
            raise AssertionError(
                f"did not end within {limit:g} s: {' '.join(command)}\n{text}"
            ) from None
        return Ended(job.returncode, text, time.time() - began)

    def srun(self, *arguments: str, limit: float = 60.0, mpi: str | None = None) -> Ended:
        """``srun --mpi=... arguments``: options, then a Python program and its arguments."""
        at = next(i for i, a in enumerate(arguments) if not a.startswith("-"))
        options, program = arguments[:at], arguments[at:]
        return self.command(
            "srun", f"--mpi={mpi or self.plugin}", *options, sys.executable, *program, limit=limit
        )

    def sbatch(
        self, *arguments: str, limit: float = 90.0, env: dict[str, str] | None = None
    ) -> Ended:
        """``sbatch arguments``, and wait for the job; the text is what it printed."""
        with tempfile.NamedTemporaryFile(dir=self.folder, suffix=".out") as out:
            submitted = self.command(
                "sbatch", "--parsable", f"--output={out.name}", *arguments, env=env
            )
            assert submitted.code == 0, submitted.text
            job = submitted.text.split()[-1]
            # not sbatch --wait, which looks every 10 s
            began = time.time()
            while True:
                shown = self.command("scontrol", "--oneliner", "show", "job", job).text
                state, status = (
                    re.search(rf"\b{name}=(\S+)", shown) for name in ("JobState", "ExitCode")
                )
                assert state and status, shown
                if state[1] not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING"):
                    break
                if time.time() - began > limit * patience():
                    self.cancel()
                    printed = Path(out.name).read_text(errors="replace")
                    raise AssertionError(f"not ended after {limit:g} s: {shown}\n{printed}")
                time.sleep(0.1)
            printed = Path(out.name).read_text(errors="replace")
        code = int(status[1].split(":")[0]) or (1 if state[1] != "COMPLETED" else 0)
        return Ended(code, printed, time.time() - began)

    def cancel(self) -> None:
        """End all jobs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(
                ["scancel", "--user=root"],
                env=self.env | {"SLURM_CONF": str(self.folder / "slurm.conf")},
                timeout=20,
            )


@contextlib.contextmanager
def cluster() -> Iterator[Cluster]:
    """Start a cluster, and end it with all that runs in it, also if this process is killed."""
    folder = Path(tempfile.gettempdir()) / f"hpcdist-slurm-test.{os.getpid()}"
    own = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_")}
    command = [CLUSTER, "start", "--dir", str(folder), "--until", str(os.getpid())]
    started = subprocess.run(
        command, env=own, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=90
    )
    assert started.returncode == 0, started.stderr
    try:
        yield Cluster(folder)
    finally:
        stopped = subprocess.run(
            [CLUSTER, "stop", "--dir", str(folder)], capture_output=True, text=True, timeout=60
        )
        assert stopped.returncode == 0 and not folder.exists(), stopped.stderr
