"""The examples for stock torch, run as a user runs them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import run_job
from places import ROOT

pytestmark = [pytest.mark.jobs, pytest.mark.any_mpi, pytest.mark.rare]

EXAMPLES = ROOT / "examples" / "torch"


def losses(text: str, what: str) -> dict[int, float]:
    # Ranks that print at once may share a line: Python writes a text and its end one by one.
    found = re.findall(rf"{what} (\d+): loss (\d+\.\d+)", text)
    return {int(number): float(loss) for number, loss in found}


def switched(script: str) -> str:
    """The script after the change that docs/torch.md shows."""
    page = (ROOT / "docs" / "torch.md").read_text()
    change = re.findall(r"```diff\n(.*?)```", page, re.S)[0]
    lines = change.splitlines()
    assert [line[0] for line in lines] == ["+", "-", "+"], change
    added, before, after = (line[1:] for line in lines)
    assert script.count(before) == 1 and script.count("import torch\n") == 1
    return script.replace(before, after).replace("import torch\n", f"import torch\n{added}\n", 1)


@pytest.mark.deadline(150)
def test_a_script_of_torchs_tutorials_runs_over_mpi_after_two_lines(tmp_path: Path) -> None:
    script = EXAMPLES / "ddp_tutorial.py"
    assert "hpcdist" not in script.read_text().split('"""', 2)[2]
    outer = ("OMPI_", "PMI", "SLURM", "TORCHELASTIC", "RANK", "WORLD", "MASTER", "LOCAL_")
    env = {name: value for name, value in os.environ.items() if not name.startswith(outer)}
    command = ["-m", "torch.distributed.run", "--nproc-per-node", "2", str(script)]
    before = subprocess.run(
        [sys.executable, *command],
        env={**env, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert before.returncode == 0, before.stderr
    assert "2 processes, backend gloo" in before.stdout
    changed = tmp_path / "ddp_tutorial.py"
    changed.write_text(switched(script.read_text()))
    after = run_job(4, str(changed))
    assert after.code == 0 and "4 processes, backend hpcdist" in after.text, after.text
    # a batch is the same whatever number of ranks shares it
    one, other = losses(before.stdout, "epoch"), losses(after.text, "epoch")
    assert sorted(one) == [10, 20, 30, 40] and one[40] < 0.1 < one[10]
    assert other == pytest.approx(one, abs=2e-3)


def test_fsdp2_goes_on_with_what_another_number_of_ranks_saved(tmp_path: Path) -> None:
    program = str(EXAMPLES / "fsdp2_checkpoint.py")
    whole = run_job(1, program, "--steps", "20")
    first = run_job(2, program, "--steps", "10", "--folder", str(tmp_path / "saved"))
    second = run_job(1, program, "--steps", "20", "--folder", str(tmp_path / "saved"))
    for ended in (whole, first, second):
        assert ended.code == 0, ended.text
    assert "goes on from step 10, ranks: 1" in second.text
    parts = [int(n) for n in re.findall(r"held (\d+) of 4801 numbers", first.text)]
    assert sum(parts) == 4801 and max(parts) < 2600
    together = losses(first.text, "step") | losses(second.text, "step")
    assert sorted(together) == [5, 10, 15, 20]
    assert together == pytest.approx(losses(whole.text, "step"), abs=2e-5)


def test_dtensor() -> None:
    ended = run_job(2, str(EXAMPLES / "dtensor.py"))
    assert ended.code == 0, ended.text
    assert "(8, 6) in rows: (4, 6) on each of 2 ranks" in ended.text
    assert "in columns, by one all_to_all: (8, 3) on rank 0" in ended.text
    assert "tensor parallel: (8, 16) of the first matrix on rank 0" in ended.text
    assert "output and gradients are those of one process" in ended.text
