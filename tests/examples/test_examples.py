"""The example programs, run as a user runs them; what they print is checked."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from example_runs import EXAMPLES, example, lines
from jobs import Ended, run_job

pytestmark = [pytest.mark.jobs, pytest.mark.any_mpi, pytest.mark.rare]


def test_hello() -> None:
    np = 4
    ended = example(np, "01_hello.py")
    greetings = lines(ended.text, rf"of {np}, on .* \(local rank \d\), backend mpi")
    assert [line.split(":")[0] for line in greetings] == [str(r) for r in range(np)]
    total = np * (np - 1) // 2
    assert lines(ended.text, "sum") == [f"{r}: the sum of all ranks is {total}" for r in range(np)]


def test_point_to_point() -> None:
    ended = example(3, "02_point_to_point.py")
    assert "[rank 1] received [0.0, 1.0, 2.0, 3.0] from rank 0" in ended.text
    assert lines(ended.text, "left neighbour") == [
        f"{r}: has {left * 10} from its left neighbour" for r, left in enumerate([2, 0, 1])
    ]
    assert "[rank 1] took tag 25: 2.5, and tag 15: 1.5" in ended.text
    assert "[rank 0] received {1: 1, 2: 4}" in ended.text
    assert lines(ended.text, r"^\[") == [
        "0: [-1.0] [0.0, 0.0, 0.0] [1.0]",
        "1: [0.0] [1.0, 1.0, 1.0] [2.0]",
        "2: [1.0] [2.0, 2.0, 2.0] [-1.0]",
    ]


def test_collectives() -> None:
    np = 3
    ended = example(np, "03_collectives.py")
    ranks = range(np)
    assert lines(ended.text, "broadcast") == [
        f"{r}: broadcast [0.0, 1.0, 2.0]   scatter [{r}.0, {r}.0]" for r in ranks
    ]
    product = 6
    assert lines(ended.text, "product") == [f"{np - 1}: product {product}   pieces {list(ranks)}"]
    total = np * (np + 1) // 2
    assert lines(ended.text, "^SUM") == [
        f"{r}: SUM {total}   AVG {total / np:g}   MAX {np}   PRODUCT {product}   "
        f"MIN of NumPy arrays [0, {1 - np}]"
        for r in ranks
    ]
    gathered = [float(r) for r in ranks for _ in range(r + 1)]
    assert lines(ended.text, "gathered") == [
        f"{r}: gathered {gathered}   exchanged {[s for s in ranks for _ in range(r + 1)]}"
        for r in ranks
    ]
    whole = [float(np * i + sum(ranks)) for i in range(2 * np)]
    assert lines(ended.text, "shard") == [
        f"{r}: shard {whole[2 * r : 2 * r + 2]}   whole {whole}" for r in ranks
    ]
    workers = [f"worker-{r}" for r in ranks]
    assert lines(ended.text, "worker") == [
        f"{r}: {{'lr': 0.1, 'layers': (64, 32)}} {workers}" for r in ranks
    ]
    assert lines(ended.text, "float32") == [
        f"0:   ranks 0, 1: all_reduce(float32[4], op=SUM) at {where()} in a_mistake",
        f"0:   rank 2: all_reduce(float32[5], op=SUM) at {where()} in a_mistake",
    ]
    assert lines(ended.text, "raised the same") == ["1: raised the same", "2: raised the same"]


def where() -> str:
    """The line of the mistake, read in the program, not in what it printed."""
    source = (EXAMPLES / "03_collectives.py").read_text().splitlines()
    number = source.index("        dist.all_reduce(wrong)") + 1
    return f"examples/03_collectives.py:{number}"


def test_ring_all_reduce() -> None:
    few = ("--largest", "40000", "--rounds", "2", "--chunk", "1000")
    ended = example(3, "04_ring_all_reduce.py", *few)
    rows = re.findall(r"^ +(\d+) +([\d.]+) +([\d.]+) +([\d.]+) +([\d.e+-]+)$", ended.text, re.M)
    assert [int(row[0]) for row in rows] == [1, 8, 64, 512, 4096, 32768]
    for elements, kib, ring, built_in, difference in rows:
        assert abs(float(kib) - int(elements) / 256) <= 0.05
        assert float(ring) > 0 and float(built_in) > 0
        assert float(difference) <= 3e-6


def test_ring_all_reduce_notices_a_wrong_sum(tmp_path: Path) -> None:
    """The example's own check has to be able to fail."""
    source = (EXAMPLES / "04_ring_all_reduce.py").read_text()
    broken = source.replace("sums[number].add_(parts[number])", "sums[number].copy_(parts[number])")
    assert broken != source
    (tmp_path / "ring.py").write_text(broken)
    for name in ("say.py", "where.py"):
        (tmp_path / name).write_text((EXAMPLES / name).read_text())
    ended = run_job(2, str(tmp_path / "ring.py"), "--largest", "10")
    assert ended.code != 0 and "elements: off by" in ended.text


def test_groups_and_mesh() -> None:
    ended = example(4, "05_groups_and_mesh.py")
    assert lines(ended.text, "their sum") == [
        f"{r}: {name} ranks {members}: rank {r} of the world is rank {r // 2} there; "
        f"their sum is {sum(members)}"
        for r, (name, members) in enumerate([("even", [0, 2]), ("odd", [1, 3])] * 2)
    ]
    assert lines(ended.text, "average in mine") == [
        f"{r}: 2 pairs; the average in mine is {r // 2 * 2 + 0.5}" for r in range(4)
    ]
    assert lines(ended.text, "row sum") == [
        f"{r}: at ({r // 2}, {r % 2}): local rank {r // 2} in its column, {r % 2} in its row; "
        f"row sum {r // 2 * 4 + 1}, column sum {r % 2 * 2 + 2}"
        for r in range(4)
    ]


def test_groups_and_mesh_of_an_odd_number() -> None:
    ended = example(3, "05_groups_and_mesh.py")
    assert len(lines(ended.text, "row sum")) == 3
    assert "a mesh of 3 x 1" in ended.text


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
    kept = lines(ended.text, "keeps the state")
    assert sum(int(line.split()[5]) for line in kept) == 6
    assert lines(ended.text, "took") == ["0: took 8 steps", "1: took 9 steps"]
    assert os.listdir(tmp_path) == ["features.pt"]


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
