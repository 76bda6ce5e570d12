"""The deadline: stacks with ranks, then the end of the process, whatever it is stuck in."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from patience import patience

from hpcdist.testing import EXIT_CODE, deadline

pytestmark = [pytest.mark.local, pytest.mark.any_mpi]

RANK_3 = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "8",
}
#: How a program may be stuck: a function that does not return, or a thread that goes on.
STUCK = {
    "sleep": "def stuck(): time.sleep(30)",
    "python loop": "def stuck():\n    while True: pass",
    "native without the GIL": "def stuck(): ctypes.CDLL(None).sleep(30)",
    "lock": "def stuck(): threading.Event().wait()",
    "another thread": (
        "def stuck(): threading.Thread(target=time.sleep, args=(30,), name='helper').start()"
    ),
}
PROGRAMS = {
    **{
        name: f"{body}\nwith deadline(0.5, 'the thing'):\n    stuck()\n    time.sleep(30)\n"
        for name, body in STUCK.items()
    },
    "in time": (
        "@deadline(1)\n"
        "def quick(x): return x + 1\n"
        "assert quick(1) == 2 and quick(2) == 3\n"
        "with deadline(1): pass\n"
        "time.sleep(2)\n"
        "print('end')\n"
    ),
    "native with the GIL": (
        "def stuck(): ctypes.PyDLL(None).sleep(30)\nwith deadline(0.5): stuck()\n"
    ),
    "rank": "with deadline(0.3): time.sleep(30)\n",
    "inner": "with deadline(20, 'outer'):\n    with deadline(0.3, 'inner'): time.sleep(30)\n",
    "outer": (
        "with deadline(1, 'outer'):\n"
        "    with deadline(20, 'inner'): pass\n"
        "    ctypes.PyDLL(None).sleep(30)\n"
    ),
    "exception": (
        "try:\n    with deadline(1): raise KeyError('x')\nexcept KeyError: pass\n"
        "time.sleep(2)\nprint('end')\n"
    ),
    "to a file": ("f = open('stacks', 'w')\nwith deadline(0.3, file=f.fileno()): time.sleep(30)\n"),
}


@dataclass
class Ended:
    """How a program ended: its status, what it wrote, and after how many seconds."""

    code: int
    stdout: str
    stderr: str
    seconds: float


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("deadline")


@pytest.fixture(scope="module")
def ended(folder: Path) -> Callable[[str], Ended]:
    """Start all programs at once, because each of them waits for seconds; give one's end."""
    head = "import ctypes, sys, threading, time\nfrom hpcdist.testing import deadline\n"
    # Variables of an mpirun around this test would name ranks.
    plain = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMI", "SLURM_"))}
    began = time.monotonic()
    started = {}
    for name, body in PROGRAMS.items():
        streams = [(folder / f"{name}.{kind}").open("w") for kind in ("out", "err")]
        started[name] = subprocess.Popen(
            [sys.executable, "-c", head + body],
            env=plain | (RANK_3 if name in ("rank", "native with the GIL") else {}),
            cwd=folder,
            stdout=streams[0],
            stderr=streams[1],
        )
        for stream in streams:
            stream.close()

    def end(name: str) -> Ended:
        code = started[name].wait(max(1.0, began + 60 - time.monotonic()))
        texts = [(folder / f"{name}.{kind}").read_text() for kind in ("out", "err")]
        return Ended(code, *texts, time.monotonic() - began)

    yield end
    for process in started.values():
        process.kill()
        process.wait()


def test_in_time_nothing_happens(ended):
    with deadline(30, "never over"):
        with deadline(20):
            pass
    done = ended("in time")
    assert done.code == 0 and done.stdout == "end\n" and not done.stderr, done.stderr


@pytest.mark.parametrize("how", STUCK)
def test_stacks_and_exit(how, ended):
    done = ended(how)
    assert done.code == EXIT_CODE == 124
    assert done.seconds < 30 * patience()
    lines = [line for line in done.stderr.splitlines() if line]
    assert all(line.startswith("[process ") for line in lines), done.stderr
    assert "deadline of 0.5 s has passed (the thing)" in lines[0]
    assert any("in <module>" in line for line in lines)
    if how == "another thread":
        assert any("thread helper" in line for line in lines)
    else:
        assert any("in stuck" in line for line in lines)


def test_native_code_that_holds_the_gil(ended):
    """Python cannot run then; the C thread shows the stacks, with the rank as a frame's name."""
    done = ended("native with the GIL")
    assert done.code == 1
    assert "in stuck" in done.stderr and "on_rank_3_of_8" in done.stderr, done.stderr


def test_launchers_rank_before_mpi_is_up(ended):
    assert "[rank 3 of 8] the deadline of 0.3 s has passed" in ended("rank").stderr


def test_nested_the_inner_one_counts(ended):
    done = ended("inner")
    assert done.code == EXIT_CODE
    assert "(inner)" in done.stderr and "(outer)" not in done.stderr
    # after the inner block, the native fallback of the outer one is armed again
    done = ended("outer")
    assert done.code == 1 and "deadline_of_1_s" in done.stderr, done.stderr


def test_it_ends_with_the_exception(ended):
    done = ended("exception")
    assert done.code == 0 and done.stdout == "end\n", done.stderr


def test_to_a_file(ended, folder):
    done = ended("to a file")
    assert done.code == EXIT_CODE and not done.stderr
    assert "has passed" in (folder / "stacks").read_text()


@pytest.mark.parametrize("seconds", [0, -1, float("nan")])
def test_arguments(seconds):
    with pytest.raises(ValueError, match="positive"):
        deadline(seconds)
