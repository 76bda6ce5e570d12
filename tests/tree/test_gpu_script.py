"""tests/gpu/run.py and what it starts, as far as they go without a GPU."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys

import pytest
import torch
from jobs import find_mpirun, run_job
from places import TESTS

pytestmark = [pytest.mark.jobs, pytest.mark.any_mpi]

GPU = TESTS / "gpu"


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["run.py", *arguments])
    return int(runpy.run_path(str(GPU / "run.py"))["main"]())


def test_without_a_gpu_nothing_is_run_and_that_is_no_success(monkeypatch, capsys) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run(monkeypatch) == 2
    assert capsys.readouterr().out == "no GPU that torch can use: nothing was run\n"
    assert run(monkeypatch, "--list", "-k", "over mpi") == 0
    names = capsys.readouterr().out.splitlines()
    assert len(names) == 4 and all(name.startswith("over MPI") for name in names)
    assert run(monkeypatch, "-k", "no such row") == 2


def test_a_row_that_cannot_run_has_failed(monkeypatch, capsys) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "stand-in")
    monkeypatch.setenv("MPIRUN", "/no/such/mpirun")
    assert run(monkeypatch, "-k", "takes GPU memory") == 1
    name = "| MPI takes GPU memory |"
    assert f"{name} FAILED: FileNotFoundError: no mpirun" in capsys.readouterr().out
    monkeypatch.delenv("MPIRUN")
    assert run(monkeypatch, "-k", "takes GPU memory") == 0
    assert f"{name} False nothing says so |" in capsys.readouterr().out


def test_rows_are_rehearsed_on_the_stand_in() -> None:
    """In a process of its own: the stand-ins stay where they have been put."""
    rows = {
        "a CUDA graph is refused": "with a clear error",
        "wait for each other": "right 60 times, on 3 streams",
        "hpcdist, 2 ranks": "BridgeGroup StagedGroup",
        "one rank, NCCL": "not rehearsed: ",
    }
    done = subprocess.run(
        [sys.executable, str(GPU / "run.py"), "--stand-in", "-k", "|".join(rows)],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "MPIRUN": find_mpirun()},
    )
    assert done.returncode == 0 and "A REHEARSAL" in done.stdout, done.stdout + done.stderr
    said = [line for line in done.stdout.splitlines() if line.startswith("|")][2:]
    assert len(said) == len(rows), done.stdout
    for text, wanted in rows.items():
        assert any(text in line and wanted in line for line in said), done.stdout


def test_the_ranks_program_checks_what_it_says() -> None:
    short = {"HPCDIST_CUDA_CHUNK": "16384"}
    ended = run_job(2, str(GPU / "ranks.py"), "--device", "cpu", "correct", env=short)
    assert ended.code == 0, ended.text
    assert "2 ranks on one GPU: 550 checks right on each" in ended.text
    if not torch.cuda.is_available():
        program = [sys.executable, str(GPU / "ranks.py"), "correct"]
        alone = subprocess.run(program, capture_output=True, text=True, timeout=60)
        assert alone.returncode != 0 and "no GPU that torch can use" in alone.stderr
