"""The deadline: stacks with ranks, then the end of the process, whatever it is stuck in."""

import subprocess
import sys
import time

import pytest

from hpcdist.testing import EXIT_CODE, deadline


def run(body: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess:
    """Run a program that imports deadline; its time is bounded."""
    import os

    code = "import ctypes, sys, threading, time\nfrom hpcdist.testing import deadline\n" + body
    # Variables of an mpirun around this test would name ranks.
    plain = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMI", "SLURM_"))}
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True, text=True, timeout=60, env={**plain, **(env or {})},
    )  # fmt: skip


def test_in_time_nothing_happens():
    with deadline(30, "never over"):
        with deadline(20):
            pass
    done = run(
        "@deadline(1)\n"
        "def quick(x): return x + 1\n"
        "assert quick(1) == 2 and quick(2) == 3\n"
        "with deadline(0.3): pass\n"
        "time.sleep(1)\n"
        "print('end')\n"
    )
    assert done.returncode == 0 and done.stdout == "end\n" and not done.stderr, done.stderr


@pytest.mark.parametrize(
    "body",
    [
        "def stuck(): time.sleep(30)",
        "def stuck():\n    while True: pass",
        "def stuck(): ctypes.CDLL(None).sleep(30)",
        "def stuck(): threading.Event().wait()",
        "def stuck(): threading.Thread(target=time.sleep, args=(30,), name='helper').start()",
    ],
    ids=["sleep", "python loop", "native without the GIL", "lock", "another thread"],
)
def test_stacks_and_exit(body):
    began = time.monotonic()
    done = run(f"{body}\nwith deadline(0.5, 'the thing'):\n    stuck()\n    time.sleep(30)\n")
    assert done.returncode == EXIT_CODE == 124
    assert time.monotonic() - began < 30
    lines = [line for line in done.stderr.splitlines() if line]
    assert all(line.startswith("[process ") for line in lines), done.stderr
    assert "deadline of 0.5 s has passed (the thing)" in lines[0]
    assert any("in <module>" in line for line in lines)
    if "helper" in body:
        assert any("thread helper" in line for line in lines)
    else:
        assert any("in stuck" in line for line in lines)


def test_native_code_that_holds_the_gil():
    """Python cannot run then; the C thread shows the stacks, with the rank as a frame's name."""
    done = run(
        "def stuck(): ctypes.PyDLL(None).sleep(30)\nwith deadline(0.5): stuck()\n",
        {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "8",
         "OMPI_COMM_WORLD_LOCAL_RANK": "3", "OMPI_COMM_WORLD_LOCAL_SIZE": "8"},
    )  # fmt: skip
    assert done.returncode == 1
    assert "in stuck" in done.stderr and "on_rank_3_of_8" in done.stderr, done.stderr


def test_launchers_rank_before_mpi_is_up():
    done = run(
        "with deadline(0.3): time.sleep(30)\n",
        {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "8",
         "OMPI_COMM_WORLD_LOCAL_RANK": "3", "OMPI_COMM_WORLD_LOCAL_SIZE": "8"},
    )  # fmt: skip
    assert "[rank 3 of 8] the deadline of 0.3 s has passed" in done.stderr


def test_nested_the_inner_one_counts():
    done = run("with deadline(20, 'outer'):\n    with deadline(0.3, 'inner'): time.sleep(30)\n")
    assert done.returncode == EXIT_CODE
    assert "(inner)" in done.stderr and "(outer)" not in done.stderr
    # after the inner block, the native fallback of the outer one is armed again
    done = run(
        "with deadline(1, 'outer'):\n"
        "    with deadline(20, 'inner'): pass\n"
        "    ctypes.PyDLL(None).sleep(30)\n"
    )
    assert done.returncode == 1 and "deadline_of_1_s" in done.stderr, done.stderr


def test_it_ends_with_the_exception():
    done = run(
        "try:\n    with deadline(0.3): raise KeyError('x')\nexcept KeyError: pass\n"
        "time.sleep(1)\nprint('end')\n"
    )
    assert done.returncode == 0 and done.stdout == "end\n", done.stderr


def test_to_a_file(tmp_path):
    path = tmp_path / "stacks"
    done = run(
        f"f = open({str(path)!r}, 'w')\nwith deadline(0.3, file=f.fileno()): time.sleep(30)\n"
    )
    assert done.returncode == EXIT_CODE and not done.stderr
    assert "has passed" in path.read_text()


@pytest.mark.parametrize("seconds", [0, -1, float("nan")])
def test_arguments(seconds):
    with pytest.raises(ValueError, match="positive"):
        deadline(seconds)
