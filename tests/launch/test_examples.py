"""The example programs, run as a user runs them; what they print is checked."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from jobs import Ended, run_job

from hpcdist import _engine
from hpcdist.launchers import mpi_family

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def example(np: int, name: str, *arguments: str, limit: float = 90.0) -> Ended:
    ended = run_job(np, str(EXAMPLES / name), *arguments, limit=limit)
    assert ended.code == 0, ended.text
    return ended


def lines(ended: Ended, pattern: str) -> list[str]:
    """What ranks said, in the order in which it was printed, as "rank: text"."""
    said = re.findall(r"\[rank (\d+)\] (.*)", ended.text)
    return [f"{rank}: {text}" for rank, text in said if re.search(pattern, text)]


def test_hello() -> None:
    np = 4
    ended = example(np, "01_hello.py")
    greetings = lines(ended, rf"of {np}, on .* \(local rank \d\), backend mpi")
    assert [line.split(":")[0] for line in greetings] == [str(r) for r in range(np)]
    total = np * (np - 1) // 2
    assert lines(ended, "sum") == [f"{r}: the sum of all ranks is {total}" for r in range(np)]


def test_point_to_point() -> None:
    ended = example(3, "02_point_to_point.py")
    assert "[rank 1] received [0.0, 1.0, 2.0, 3.0] from rank 0" in ended.text
    assert lines(ended, "left neighbour") == [
        f"{r}: has {left * 10} from its left neighbour" for r, left in enumerate([2, 0, 1])
    ]
    assert "[rank 1] took tag 25: 2.5, and tag 15: 1.5" in ended.text
    assert "[rank 0] received {1: 1, 2: 4}" in ended.text
    assert lines(ended, r"^\[") == [
        "0: [-1.0] [0.0, 0.0, 0.0] [1.0]",
        "1: [0.0] [1.0, 1.0, 1.0] [2.0]",
        "2: [1.0] [2.0, 2.0, 2.0] [-1.0]",
    ]


def test_point_to_point_needs_two() -> None:
    ended = run_job(1, str(EXAMPLES / "02_point_to_point.py"))
    assert ended.code != 0
    assert "needs at least two ranks: mpirun -n 2" in ended.text


@pytest.mark.parametrize("np", [1, 3])
def test_collectives(np: int) -> None:
    ended = example(np, "03_collectives.py")
    ranks = range(np)
    assert lines(ended, "broadcast") == [
        f"{r}: broadcast [0.0, 1.0, 2.0]   scatter [{r}.0, {r}.0]" for r in ranks
    ]
    product = {1: 1, 3: 6}[np]
    assert lines(ended, "product") == [f"{np - 1}: product {product}   pieces {list(ranks)}"]
    total = np * (np + 1) // 2
    assert lines(ended, "^SUM") == [
        f"{r}: SUM {total}   AVG {total / np:g}   MAX {np}   PRODUCT {product}   "
        f"MIN of NumPy arrays [0, {1 - np}]"
        for r in ranks
    ]
    gathered = [float(r) for r in ranks for _ in range(r + 1)]
    assert lines(ended, "gathered") == [
        f"{r}: gathered {gathered}   exchanged {[s for s in ranks for _ in range(r + 1)]}"
        for r in ranks
    ]
    whole = [float(np * i + sum(ranks)) for i in range(2 * np)]
    assert lines(ended, "shard") == [
        f"{r}: shard {whole[2 * r : 2 * r + 2]}   whole {whole}" for r in ranks
    ]
    workers = [f"worker-{r}" for r in ranks]
    assert lines(ended, "worker") == [
        f"{r}: {{'lr': 0.1, 'layers': (64, 32)}} {workers}" for r in ranks
    ]
    if np == 1:
        assert lines(ended, "nobody to disagree") == [
            "0: is alone, so there is nobody to disagree with"
        ]
    else:
        assert lines(ended, "float32") == [
            f"0:   ranks 0, 1: all_reduce(float32[4], op=SUM) at {where(ended)} in a_mistake",
            f"0:   rank 2: all_reduce(float32[5], op=SUM) at {where(ended)} in a_mistake",
        ]
        assert lines(ended, "raised the same") == ["1: raised the same", "2: raised the same"]


def where(ended: Ended) -> str:
    """The line of the mistake, read in the program, not in what it printed."""
    source = (EXAMPLES / "03_collectives.py").read_text().splitlines()
    number = source.index("        dist.all_reduce(wrong)") + 1
    return f"examples/03_collectives.py:{number}"


@pytest.mark.parametrize(("np", "chunk"), [(1, 100), (3, 1000)])
def test_ring_all_reduce(np: int, chunk: int) -> None:
    ended = example(
        np, "04_ring_all_reduce.py", "--largest", "40000", "--rounds", "2", "--chunk", str(chunk)
    )
    rows = re.findall(r"^ +(\d+) +([\d.]+) +([\d.]+) +([\d.]+) +([\d.e+-]+)$", ended.text, re.M)
    assert [int(row[0]) for row in rows] == [1, 8, 64, 512, 4096, 32768]
    for elements, kib, ring, built_in, difference in rows:
        assert abs(float(kib) - int(elements) / 256) <= 0.05
        assert float(ring) > 0 and float(built_in) > 0
        assert float(difference) <= 1e-6 * np


def test_ring_all_reduce_notices_a_wrong_sum(tmp_path: Path) -> None:
    """The example's own check has to be able to fail."""
    source = (EXAMPLES / "04_ring_all_reduce.py").read_text()
    broken = source.replace("sums[number].add_(parts[number])", "sums[number].copy_(parts[number])")
    assert broken != source
    (tmp_path / "ring.py").write_text(broken)
    (tmp_path / "say.py").write_text((EXAMPLES / "say.py").read_text())
    ended = run_job(2, str(tmp_path / "ring.py"), "--largest", "10")
    assert ended.code != 0 and "elements: off by" in ended.text


def test_groups_and_mesh() -> None:
    ended = example(4, "05_groups_and_mesh.py")
    assert lines(ended, "their sum") == [
        f"{r}: {name} ranks {members}: rank {r} of the world is rank {r // 2} there; "
        f"their sum is {sum(members)}"
        for r, (name, members) in enumerate([("even", [0, 2]), ("odd", [1, 3])] * 2)
    ]
    assert lines(ended, "average in mine") == [
        f"{r}: 2 pairs; the average in mine is {r // 2 * 2 + 0.5}" for r in range(4)
    ]
    assert lines(ended, "row sum") == [
        f"{r}: at ({r // 2}, {r % 2}): local rank {r // 2} in its column, {r % 2} in its row; "
        f"row sum {r // 2 * 4 + 1}, column sum {r % 2 * 2 + 2}"
        for r in range(4)
    ]


@pytest.mark.parametrize("np", [1, 3])
def test_groups_and_mesh_with_other_numbers(np: int) -> None:
    ended = example(np, "05_groups_and_mesh.py")
    assert len(lines(ended, "row sum")) == np
    assert f"a mesh of {np} x 1" in ended.text


def losses(ended: Ended) -> list[float]:
    return [float(loss) for loss in re.findall(r"^epoch \d+: loss ([\d.]+)$", ended.text, re.M)]


def test_average_gradients_trains_the_same_on_any_number_of_ranks() -> None:
    one, three = (example(np, "06_average_gradients.py") for np in (1, 3))
    assert len(losses(one)) == 12 and losses(one)[-1] < 0.1 * losses(one)[0]
    assert losses(one) == pytest.approx(losses(three), abs=2e-4)
    accuracies = re.findall(r"test accuracy ([\d.]+)%, parameters equal on all ranks", three.text)
    assert len(accuracies) == 3 and min(map(float, accuracies)) > 85


def test_ddp_features(tmp_path: Path) -> None:
    ended = example(2, "07_ddp_features.py", "--save", str(tmp_path / "features.pt"))
    rows = dict(
        re.findall(r"^(\S.*?) +loss ([\d.]+), parameters equal on all ranks$", ended.text, re.M)
    )
    assert len(rows) == 11 and "DIFFERENT" not in ended.text
    assert rows["plain"] == rows["ZeroRedundancyOptimizer"] == rows["ZeRO inside backward"]
    assert rows["plain"] == rows["stopped"] == rows["not stopped"]
    assert float(rows["bfloat16"]) == pytest.approx(float(rows["plain"]), abs=0.01)
    kept = lines(ended, "keeps the state")
    assert sum(int(line.split()[5]) for line in kept) == 6
    assert lines(ended, "took") == ["0: took 8 steps", "1: took 9 steps"]
    assert os.listdir(tmp_path) == ["features.pt"]


def test_ddp_features_on_one_rank() -> None:
    assert "keeps the state of 6 of 6" in example(1, "07_ddp_features.py").text


def test_transformer_goes_on_and_trains_alike_on_any_number_of_ranks(tmp_path: Path) -> None:
    few = ("--batch-size", "6", "--every", "10", "--write", "5")
    file = str(tmp_path / "writer.pt")
    whole = example(1, "08_transformer.py", "--steps", "20", *few)
    first = example(3, "08_transformer.py", "--steps", "10", "--save", file, *few)
    second = example(2, "08_transformer.py", "--steps", "20", "--resume", file, *few)
    found = [
        re.findall(r"^step (\d+): loss ([\d.]+)$", e.text, re.M) for e in (whole, first, second)
    ]
    assert [int(step) for step, _ in found[0]] == [10, 20]
    losses = [float(loss) for _, loss in found[0]]
    assert max(losses) < 3.6  # who guesses among 95 characters has 4.55
    assert [float(loss) for _, loss in found[1] + found[2]] == pytest.approx(losses, abs=2e-2)
    assert os.listdir(tmp_path) == ["writer.pt"]
    assert "it writes:" in second.text


# --- train_digits.py -----------------------------------------------------------------------------

TRAIN = str(EXAMPLES / "train_digits.py")
ROW = re.compile(r"^ +(\d+) +([\d.]+) +([\d.]+)% +(\d+) +([\d.]+)%$", re.MULTILINE)


def accuracy(text: str) -> float:
    return float(re.search(r"^test accuracy ([\d.]+)% after", text, re.MULTILINE)[1])


def fingerprint(text: str) -> str:
    return re.search(r"^parameters equal on all ranks: ([0-9a-f]{16})$", text, re.MULTILINE)[1]


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


def test_a_checkpoint_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    save = runpy.run_path(TRAIN)["save"]
    path = tmp_path / "state.pt"
    save(path, {"epoch": 1})

    class Unwritable:
        def __reduce__(self):
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        save(path, {"epoch": 2, "model": torch.ones(1000), "bad": Unwritable()})
    assert torch.load(path, weights_only=True) == {"epoch": 1}


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


@pytest.mark.parametrize("content", [b"", b"not a checkpoint"])
def test_a_checkpoint_that_is_none(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "bad.pt").write_bytes(content)
    command = [sys.executable, TRAIN, "--resume", str(tmp_path / "bad.pt")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert re.search(r"^  rank 0: \w+Error", done.stderr, re.MULTILINE)
    assert "Traceback" not in done.stderr


def without(module: str, *arguments: str) -> subprocess.CompletedProcess:
    """Run train_digits.py where a package is not installed."""
    program = (
        f"import runpy, sys; sys.modules[{module!r}] = None; "
        f"sys.argv = ['train_digits.py', *{arguments!r}]; "
        f"runpy.run_path({TRAIN!r}, run_name='__main__')"
    )
    command = [sys.executable, "-c", program]
    return subprocess.run(command, capture_output=True, text=True, timeout=90)


def test_without_scikit_learn_the_pip_command_is_named() -> None:
    done = without("sklearn.datasets")
    assert done.returncode == 1
    assert "pip install scikit-learn" in done.stderr
    assert "Traceback" not in done.stderr


def test_without_tqdm_there_is_just_no_bar() -> None:
    done = without("tqdm", "--epochs", "1")
    assert done.returncode == 0, done.stderr
    assert "pip install tqdm" in done.stderr
    fingerprint(done.stdout)


def test_the_progress_bar_comes_from_one_rank_only() -> None:
    ended = example(2, "train_digits.py", "--epochs", "2")
    steps = re.findall(r"(\d+)/(\d+) \[", ended.text)
    assert {total for _, total in steps} == {"48"}
    counts = [int(done) for done, _ in steps]
    assert counts == sorted(counts) and counts[0] == 0


def parse(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["train_digits.py", *arguments])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(TRAIN)["parse"]()
    assert ended.value.code == (0 if arguments == ("--help",) else 2)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--epochs", "0"], "must be positive"),
        (["--lr", "nan"], "must be positive"),
        (["--batch-size", "-3"], "must be positive"),
        (["--nonsense"], "unrecognized arguments"),
    ],
)
def test_bad_arguments(
    arguments: list[str],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    parse(monkeypatch, *arguments)
    assert says in capsys.readouterr().err


def test_help_names_every_option(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parse(monkeypatch, "--help")
    text = capsys.readouterr().out
    for option in ("--epochs", "--batch-size", "--lr", "--save", "--resume", "--seed", "--threads"):
        assert option in text


def test_a_batch_that_cannot_be_divided() -> None:
    ended = run_job(2, TRAIN, "--batch-size", "7")
    assert ended.code != 0
    assert "--batch-size 7 cannot be divided by 2 ranks" in ended.text
