"""examples/train_digits.py on two ranks: the accuracy, checkpoints, other ways to start."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from example_runs import EXAMPLES, example, fingerprint
from jobs import run_job

from hpcdist import _engine
from hpcdist.launchers import mpi_family

TRAIN = str(EXAMPLES / "train_digits.py")
ROW = re.compile(r"^ +(\d+) +([\d.]+) +([\d.]+)% +(\d+) +([\d.]+)%$", re.MULTILINE)


def accuracy(text: str) -> float:
    return float(re.search(r"^test accuracy ([\d.]+)% after", text, re.MULTILINE)[1])


def test_digits_reach_97_percent_on_two_ranks_in_a_minute() -> None:
    ended = example(2, "train_digits.py", "--no-progress", limit=60)
    rows = ROW.findall(ended.text)
    assert [int(row[0]) for row in rows] == list(range(1, 21))
    assert float(rows[-1][1]) < 0.1 < float(rows[0][1])
    assert all(float(row[3]) > 0 and 0 < float(row[4]) < 100 for row in rows)
    assert accuracy(ended.text) >= 97
    fingerprint(ended.text)


SPAWNED = """
import runpy, sys
import hpcdist

def train(rank, arguments):
    sys.argv = arguments
    runpy.run_path(arguments[0], run_name="__main__")

if __name__ == "__main__":
    hpcdist.spawn(train, (sys.argv[1:],), nprocs=2)
"""


@pytest.mark.deadline(150)
def test_digits_end_the_same_however_they_are_started(tmp_path: Path) -> None:
    """mpirun, hpcdist.spawn, torchrun with MPICH: the same bits. One process: the same losses."""
    arguments = ["--epochs", "1", "--no-progress", "--seed", "4"]
    (tmp_path / "spawned.py").write_text(SPAWNED)
    starts = [[str(tmp_path / "spawned.py"), TRAIN], [TRAIN]]
    if mpi_family(_engine.library_version()) != "Open MPI":
        starts.append(["-m", "torch.distributed.run", "--nproc-per-node", "2", TRAIN])
    under_mpirun = example(2, "train_digits.py", *arguments).text
    for start in starts:
        done = subprocess.run(
            [sys.executable, *start, *arguments], capture_output=True, text=True, timeout=90
        )
        assert done.returncode == 0, done.stderr
        # without the rank that spawn puts in front of each line; hydra takes a newline that is
        # written by itself for a line
        text = re.sub(r"\[\d+\] |\[1,\d+\]<stdout>: ", "", done.stdout)
        tables = [[float(row[1]) for row in ROW.findall(t)] for t in (text, under_mpirun)]
        assert len(tables[0]) == 1 and tables[0] == pytest.approx(tables[1], abs=2e-3), text
        if start == [TRAIN]:
            assert "1 rank(s), 1 thread(s) each" in text
        else:
            assert fingerprint(text) == fingerprint(under_mpirun)


def test_digits_resumed_end_like_those_that_were_not_interrupted(tmp_path: Path) -> None:
    whole, part = str(tmp_path / "whole.pt"), str(tmp_path / "part.pt")
    full = example(2, "train_digits.py", "--epochs", "4", "--save", whole, "--no-progress")
    example(2, "train_digits.py", "--epochs", "2", "--save", part, "--no-progress")
    rest = example(
        2, "train_digits.py", "--epochs", "4", "--resume", part, "--save", part, "--no-progress"
    )
    assert ", from epoch 2" in rest.text
    assert fingerprint(rest.text) == fingerprint(full.text)
    assert [row[:3] for row in ROW.findall(rest.text)] == [
        row[:3] for row in ROW.findall(full.text)[2:]
    ]
    one, other = (torch.load(path, weights_only=True) for path in (whole, part))
    assert one["epoch"] == other["epoch"] == 4
    assert all(torch.equal(one["model"][k], other["model"][k]) for k in one["model"])
    assert sorted(os.listdir(tmp_path)) == ["part.pt", "whole.pt"]


RANK = "next(os.environ[v] for v in ('OMPI_COMM_WORLD_RANK', 'PMI_RANK') if v in os.environ)"


def test_a_checkpoint_that_one_rank_cannot_read(tmp_path: Path) -> None:
    torch.save({"epoch": 1}, tmp_path / "rank0.pt")
    program = (
        f"import os, runpy, sys; rank = {RANK}; "
        f"sys.argv = ['train_digits.py', '--resume', {str(tmp_path)!r} + f'/rank{{rank}}.pt']; "
        f"runpy.run_path({TRAIN!r}, run_name='__main__')"
    )
    ended = run_job(2, "-c", program)
    assert ended.code != 0
    assert "must be readable on every rank" in ended.text
    assert re.search(r"^  rank 1: FileNotFoundError", ended.text, re.MULTILINE)
    assert not re.search(r"^  rank 0:", ended.text, re.MULTILINE)
    assert "Traceback" not in ended.text


def test_the_progress_bar_comes_from_one_rank_only() -> None:
    ended = example(2, "train_digits.py", "--epochs", "2")
    steps = re.findall(r"(\d+)/(\d+) \[", ended.text)
    assert {total for _, total in steps} == {"48"}
    counts = [int(done) for done, _ in steps]
    assert counts == sorted(counts) and counts[0] == 0


def test_a_batch_that_cannot_be_divided() -> None:
    ended = run_job(2, TRAIN, "--batch-size", "7")
    assert ended.code != 0
    assert "--batch-size 7 cannot be divided by 2 ranks" in ended.text
