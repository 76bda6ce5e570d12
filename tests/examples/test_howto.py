"""The programs of the how-to pages and of the tutorial, run as the pages say."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import plain_environment, run_job
from places import ROOT

pytestmark = [pytest.mark.jobs, pytest.mark.any_mpi, pytest.mark.rare]


def blocks(page: str, language: str = "python") -> list[str]:
    text = (ROOT / "docs" / page).read_text()
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.M | re.S)


def changed(script: str, change: str) -> str:
    """The script after a change in the form of diff, which names every line from first to last."""
    lines = script.splitlines()
    result, place = [], 0
    for line in change.splitlines():
        mark, text = line[:1], line[1:]
        if mark in ("-", " "):
            assert lines[place] == text, f"the script has {lines[place]!r}, the change {text!r}"
            place += 1
        if mark in ("+", " "):
            result.append(text)
    return "\n".join([*result, *lines[place:]]) + "\n"


def run(np: int, folder: Path, program: str) -> str:
    path = folder / "program.py"
    path.write_text(program)
    ended = run_job(np, str(path))
    assert ended.code == 0, ended.text
    return ended.text


@pytest.mark.deadline(240)
def test_from_torchrun_to_mpirun_in_ten_lines(tmp_path: Path) -> None:
    (script,), (change,) = blocks("from-torchrun.md"), blocks("from-torchrun.md", "diff")
    assert len(re.findall(r"^[+-]\S", change, re.M)) == 10
    (tmp_path / "before.py").write_text(script)
    for _ in range(3):
        before = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "before.py"],
            env=plain_environment(GLOO_SOCKET_IFNAME="lo"), cwd=tmp_path,
            capture_output=True, text=True, timeout=70,
        )  # fmt: skip
        # torch alone, over gloo: a thread of it may still run as Python ends, on a busy machine
        if "terminate called without an active exception" not in before.stderr:
            break
    assert before.returncode == 0, before.stderr
    said = r"local rank 0, weights (-?\d+\.\d+)"
    (weights,) = re.findall(said, before.stdout)
    (after,) = re.findall(said, run(2, tmp_path, changed(script, change)))
    assert float(after) == pytest.approx(float(weights), abs=2e-4)


@pytest.mark.deadline(240)  # three jobs
def test_the_tutorial(tmp_path: Path) -> None:
    first, mistake, train = blocks("tutorial.md")
    text = run(2, tmp_path, first)
    assert all(f"rank {rank} of 2: [3.0, 3.0, 3.0]" in text for rank in range(2))
    path = tmp_path / "first.py"
    path.write_text(re.sub(r"^x = .*$", mistake.strip(), first, flags=re.M))
    ended = run_job(2, str(path))
    assert ended.code != 0 and "rank 1: all_reduce(float32[4], op=SUM) at" in ended.text
    assert "2 rank(s): loss 0.000000" in run(2, tmp_path, train)


def test_fsdp2(tmp_path: Path) -> None:
    (program,) = blocks("fsdp2.md")
    (loss,) = re.findall(r"^loss (\S+)$", run(2, tmp_path, program), re.M)
    assert 0 < float(loss) < 100
