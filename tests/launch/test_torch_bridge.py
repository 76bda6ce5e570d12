"""Stock torch.distributed, with hpcdist as its backend and with MPI as its way to meet."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from jobs import run_job

PROGRAM = str(Path(__file__).with_name("bridge.py"))
CHECKS = ["collectives", "objects and messages", "groups, mesh, DTensor", "DDP and FSDP2"]


@pytest.mark.parametrize(("np", "backend"), [(2, "hpcdist"), (3, "hpcdist"), (2, "gloo")])
def test_stock_torch_runs_over_mpi(np: int, backend: str) -> None:
    ended = run_job(np, PROGRAM, backend)
    assert ended.code == 0, ended.text
    said = ended.text.splitlines()
    assert [line for line in said if line in CHECKS] == CHECKS, ended.text
    assert ("both sides" in said) == (backend == "hpcdist")
    assert sum("is done" in line for line in said) == np


def test_arguments_that_mpi_answers_and_groups_of_others_are_refused() -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            """
import torch.distributed as td, hpcdist.torch
for call in (
    lambda: hpcdist.torch.init_process_group(rank=0),
    lambda: hpcdist.torch.group(),
    lambda: hpcdist.torch.group(7),
):
    try:
        call()
    except (TypeError, ValueError) as error:
        print(type(error).__name__, error)
""",
        ],
        capture_output=True,
        text=True,
        timeout=60,
    )
    first, second, third = done.stdout.splitlines()
    assert first == "TypeError ['rank'] come from MPI and cannot be given", done.stderr
    assert second == "ValueError torch.distributed has no default group yet"
    assert third.startswith("TypeError 7 is not a group of the backend 'hpcdist'")
