"""One training, started in every way there is: its last lines are the same."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from example_runs import EXAMPLES, example, fingerprint
from mpis import OPEN_MPI
from slurm import Cluster

pytestmark = [pytest.mark.jobs, pytest.mark.slurm, pytest.mark.rare]

TRAIN = str(EXAMPLES / "train_digits.py")
# float64: what two ranks round differently than one does not reach the digits that are printed
ARGUMENTS = ("--double", "--epochs", "1", "--no-progress")

SPAWNED = """
import os, runpy, sys
import hpcdist

def train(rank, arguments):
    sys.argv = arguments
    sys.path.insert(0, os.path.dirname(arguments[0]))  # as Python does for a script
    runpy.run_path(arguments[0], run_name="__main__")

if __name__ == "__main__":
    hpcdist.spawn(train, (sys.argv[1:],), nprocs=2)
"""


def python(*command: str) -> str:
    """What a Python program prints that no launcher has started, without the ranks' marks."""
    done = subprocess.run(
        [sys.executable, *command, *ARGUMENTS], capture_output=True, text=True, timeout=90
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return re.sub(r"\[\d+\] |\[1,\d+\]<stdout>: ", "", done.stdout)


def end(text: str) -> str:
    """The last epoch's loss and accuracy, without times."""
    row = re.search(r"^ +1 +([\d.]+) +([\d.]+%) ", text, re.MULTILINE)
    last = re.search(r"^(test accuracy [\d.]+%) after", text, re.MULTILINE)
    assert row and last, text
    return f"loss {row[1]}, {last[1]}"


@pytest.mark.deadline(200)
def test_a_training_ends_the_same_however_it_is_started(cluster: Cluster, tmp_path: Path) -> None:
    """mpirun, srun over two nodes, hpcdist.spawn, torchrun with MPICH: the same bits.

    One process alone: the same lines. It does not use MPI's reductions, so that what Open MPI's and
    MPICH's runs of this test compare with is the same.
    """
    one = python(TRAIN)
    assert one.startswith("1 rank(s)")
    (tmp_path / "spawned.py").write_text(SPAWNED)
    started = {
        "mpirun": example(2, "train_digits.py", *ARGUMENTS).text,
        "spawn": python(str(tmp_path / "spawned.py"), TRAIN),
    }
    ended = cluster.srun("-N2", "-n2", TRAIN, *ARGUMENTS)
    assert ended.code == 0, ended.text
    started["srun"] = ended.text
    if not OPEN_MPI:
        started["torchrun"] = python("-m", "torch.distributed.run", "--nproc-per-node", "2", TRAIN)
    for how, text in started.items():
        assert "2 rank(s)" in text, f"{how}: {text}"
        assert end(text) == end(one), f"{how}: {text}\nalone: {one}"
        assert fingerprint(text) == fingerprint(started["mpirun"]), f"{how}: {text}"
