"""tests/gpu/run.py and what it starts, as far as they go without a GPU."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
import torch
from jobs import run_job

GPU = Path(__file__).resolve().parents[1] / "gpu"


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


def test_the_ranks_program_checks_what_it_says() -> None:
    ended = run_job(2, str(GPU / "ranks.py"), "--device", "cpu", "correct")
    assert ended.code == 0, ended.text
    assert "2 ranks on one GPU: 550 checks right on each" in ended.text
    if not torch.cuda.is_available():
        ended = run_job(2, str(GPU / "ranks.py"), "correct")
        assert ended.code != 0 and "no GPU that torch can use" in ended.text
