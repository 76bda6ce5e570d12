"""tests/gpu/run.py and what it starts, as far as they go without a GPU."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from jobs import find_mpirun, run_job
from places import TESTS

pytestmark = [pytest.mark.jobs, pytest.mark.rare, pytest.mark.any_mpi]

GPU = TESTS / "gpu"
#: run.py with other rows, each of which ends in its own way.
ROWS = """
import ctypes, os, signal, subprocess, sys, time
sys.path.insert(0, sys.argv.pop(1))
import run
from gpu_table import Row

def hang():
    subprocess.Popen(["sleep", "4242"], start_new_session=True)
    print("about to hang", flush=True)
    time.sleep(4242)

def abort():
    print("about to abort", flush=True)
    os.abort()

def wrong():
    assert False, "a | b"

run.ROWS[:] = [
    Row("right", lambda: "one\\ntwo", gpu=False),
    Row("aborts", abort, gpu=False),
    Row("hangs", hang, seconds=-9, gpu=False),
    Row("leaves", lambda: os._exit(3), gpu=False),
    Row("reads nothing", lambda: ctypes.string_at(8), gpu=False),
    Row("wrong", wrong, gpu=False),
    Row("long", lambda: "never", seconds=999, gpu=False),
    Row("last", lambda: "still there", gpu=False),
]
sys.exit(run.main())
"""


def start(*arguments: str, program: str = "", **env: str) -> subprocess.Popen[str]:
    how = ["-c", program, str(GPU)] if program else [str(GPU / "run.py")]
    return subprocess.Popen(
        [sys.executable, *how, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "MPIRUN": find_mpirun(), **env},
    )


def run(*arguments: str, program: str = "", **env: str) -> tuple[int, str]:
    job = start(*arguments, program=program, **env)
    try:
        said = job.communicate(timeout=200)[0]
    finally:
        job.terminate()  # where it is late; it ends what it has started
    return job.returncode, said


def results(folder: Path) -> dict[str, dict]:
    lines = (folder / "rows.jsonl").read_text().splitlines()
    return {row["row"]: row for row in map(json.loads, lines)}


def left_running() -> bool:
    commands = Path("/proc").glob("[0-9]*/cmdline")
    return any(b"sleep\x004242" in path.read_bytes() for path in commands if path.exists())


def test_without_a_gpu_nothing_is_run_and_that_is_no_success() -> None:
    code, said = run("-k", "where the GPU is", CUDA_VISIBLE_DEVICES="")
    assert code == 2 and said.endswith("no GPU that torch can use: nothing was run\n"), said


def test_rows_are_chosen_by_name() -> None:
    code, said = run("--list", "-k", "over mpi")
    *names, total = said.splitlines()
    assert code == 0 and total.endswith(" s in all")
    assert len(names) >= 4 and all(" s  over MPI" in name for name in names)
    assert "over MPI" not in run("--list", "-k", "not over mpi")[1]
    assert run("-k", "no such row")[0] == 2


def test_a_row_that_cannot_run_has_failed() -> None:
    row = ("--stand-in", "-k", "takes GPU memory")
    code, said = run(*row, MPIRUN="/no/such/mpirun")
    name = "| MPI takes GPU memory |"
    assert code == 1 and f"{name} FAILED: FileNotFoundError: no mpirun" in said, said
    code, said = run(*row)
    assert code == 0 and f"{name} False nothing indicates it |" in said, said


def test_a_row_ends_by_itself_however_it_ends(tmp_path: Path) -> None:
    code, said = run("--seconds", "200", "--output", str(tmp_path), program=ROWS)
    assert code == 1, said
    rows = results(tmp_path)
    table = (tmp_path / "table.md").read_text()
    for name, status, text in (
        ("right", "ok", "one\ntwo"),
        ("aborts", "crashed", "SIGABRT"),
        ("hangs", "hung", "not done after 3 s"),
        ("leaves", "crashed", "exit status 3"),
        ("reads nothing", "crashed", "SIGSEGV"),
        ("wrong", "failed", "AssertionError: a | b"),
        ("long", "not run", "needs 999 s, "),
        ("last", "ok", "still there"),
    ):
        assert rows[name]["status"] == status and rows[name]["result"].startswith(text), rows[name]
        assert f"\n| {name} | " in table and f"\n| {name} | " in said
    assert "about to abort" in rows["aborts"]["tail"]
    assert "about to hang" in rows["hangs"]["tail"]
    assert any("in hang" in line for line in rows["hangs"]["tail"])  # its stack
    assert "| wrong | FAILED: AssertionError: a / b |" in table
    assert "\nright:\n\n```text\ntwo\n```" in table
    assert not left_running()


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_the_row_and_leaves_a_table(tmp_path: Path, sent: signal.Signals) -> None:
    names = "hangs|last"
    slow = ROWS.replace("seconds=-9", "seconds=99")
    job = start("--output", str(tmp_path), "-k", names, program=slow)
    until = time.monotonic() + 60
    log = tmp_path / "output.log"
    while not (log.exists() and "about to hang" in log.read_text()):
        assert time.monotonic() < until
        time.sleep(0.05)
    job.send_signal(sent)
    said = job.communicate(timeout=30)[0]
    assert job.returncode == 130, said
    rows = results(tmp_path)
    assert rows["hangs"]["status"] == "interrupted" and "about to hang" in rows["hangs"]["tail"]
    assert rows["last"]["result"] == "interrupted before"
    assert "| last | not run: interrupted before |" in (tmp_path / "table.md").read_text()
    assert not left_running()


@pytest.mark.slow
@pytest.mark.deadline(240)
def test_rows_are_rehearsed_on_the_stand_in() -> None:
    rows = {
        "a CUDA graph is refused": "with a clear error",
        "wait for each other": "right 60 times, on 3 streams",
        "hpcdist, 2 ranks": "BridgeGroup StagedGroup",
        "one rank, NCCL": "not rehearsed: ",
        "windows": "symmetric window: registered",
        "transformer in bf16": "parameters bitwise equal",
        "a ResNet-50 in a CUDA graph": "not rehearsed: ",
    }
    code, said = run("--stand-in", "-k", "|".join(rows))
    assert code == 0 and "A REHEARSAL" in said, said
    lines = [line for line in said.splitlines() if line.startswith("|")][2:]
    assert len(lines) == len(rows), said
    for text, wanted in rows.items():
        assert any(text in line and wanted in line for line in lines), said


def test_the_ranks_program_checks_what_it_says() -> None:
    short = {"HPCDIST_CUDA_CHUNK": "16384"}
    ended = run_job(2, str(GPU / "ranks.py"), "--device", "cpu", "correct", env=short)
    assert ended.code == 0, ended.text
    assert "2 ranks on one GPU: 550 checks right on each" in ended.text
    if not torch.cuda.is_available():
        program = [sys.executable, str(GPU / "ranks.py"), "correct"]
        alone = subprocess.run(program, capture_output=True, text=True, timeout=60)
        assert alone.returncode != 0 and "no GPU that torch can use" in alone.stderr
