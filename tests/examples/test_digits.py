"""examples/train_digits.py on two ranks: accuracy, checkpoints, progress, what it refuses."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
import torch
from example_runs import EXAMPLES, example, fingerprint
from jobs import mpirun_command, run_job
from terminals import Terminal

pytestmark = [pytest.mark.jobs, pytest.mark.any_mpi, pytest.mark.rare]

TRAIN = str(EXAMPLES / "train_digits.py")
ROW = re.compile(r"^ +(\d+) +([\d.]+) +([\d.]+)% +(\d+) +([\d.]+)%$", re.MULTILINE)

#: What the progress bar shows.
STEPS = re.compile(r"(\d+)/(\d+) \[")


def accuracy(text: str) -> float:
    return float(re.search(r"^test accuracy ([\d.]+)% after", text, re.MULTILINE)[1])


@pytest.mark.deadline(180)
def test_digits_reach_97_percent_on_two_ranks() -> None:
    ended = example(2, "train_digits.py", "--no-progress")
    rows = ROW.findall(ended.text)
    assert [int(row[0]) for row in rows] == list(range(1, 21))
    assert float(rows[-1][1]) < 0.1 < float(rows[0][1])
    assert all(float(row[3]) > 0 and 0 < float(row[4]) < 100 for row in rows)
    assert accuracy(ended.text) >= 97
    fingerprint(ended.text)


@pytest.mark.deadline(180)  # three trainings
def test_digits_resumed_end_like_those_that_were_not_interrupted(tmp_path: Path) -> None:
    whole, part = str(tmp_path / "whole.pt"), str(tmp_path / "part.pt")
    full = example(2, "train_digits.py", "--epochs", "4", "--save", whole, "--no-progress")
    first = example(2, "train_digits.py", "--epochs", "2", "--save", part)
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
    assert not STEPS.findall(first.text), "a bar in a log file"


def test_a_terminal_gets_a_progress_bar_of_one_rank() -> None:
    command, env = mpirun_command(2)
    with Terminal(*command, sys.executable, TRAIN, "--epochs", "1", env=env) as terminal:
        text = terminal.until(r"(?s).*parameters equal", 80)[0]
        assert terminal.end() == 0
    steps = STEPS.findall(text)
    assert {total for _, total in steps} == {"24"}
    counts = [int(done) for done, _ in steps]
    assert counts == sorted(counts) and counts[0] == 0


RANK = "next(os.environ[v] for v in ('OMPI_COMM_WORLD_RANK', 'PMI_RANK') if v in os.environ)"


def test_a_checkpoint_that_one_rank_cannot_read(tmp_path: Path) -> None:
    torch.save({"epoch": 1}, tmp_path / "rank0.pt")
    program = (
        f"import os, runpy, sys; sys.path.insert(0, {os.path.dirname(TRAIN)!r}); rank = {RANK}; "
        f"sys.argv = ['train_digits.py', '--resume', {str(tmp_path)!r} + f'/rank{{rank}}.pt']; "
        f"runpy.run_path({TRAIN!r}, run_name='__main__')"
    )
    ended = run_job(2, "-c", program)
    assert ended.code != 0
    assert "must be readable on every rank" in ended.text
    assert re.search(r"^  rank 1: FileNotFoundError", ended.text, re.MULTILINE)
    assert not re.search(r"^  rank 0:", ended.text, re.MULTILINE)
    assert "Traceback" not in ended.text


def test_a_batch_that_cannot_be_divided() -> None:
    ended = run_job(2, TRAIN, "--batch-size", "7")
    assert ended.code != 0
    assert "--batch-size 7 cannot be divided by 2 ranks" in ended.text
