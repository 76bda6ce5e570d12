"""``python -m hpcdist bench`` under mpirun: benches, formats, wrong results, wrong arguments."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import run_job

PROGRAM = Path(__file__).with_name("benches.py")
OURS = {"hpcdist", "hpcdist-off"}
# one job runs all benches
pytestmark = [pytest.mark.jobs, pytest.mark.any_mpi, pytest.mark.rare, pytest.mark.deadline(300)]

EVERY = OURS | {"c", "floor", "mpi4py", "gloo"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What one job of two ranks has written."""
    made = tmp_path_factory.mktemp("bench")
    ended = run_job(2, str(PROGRAM), str(made))
    assert ended.code == 0, ended.text
    return made


def rows_of(path: Path) -> list[dict]:
    return json.loads(path.read_text())["rows"]


def test_the_exit_status_tells_of_wrong_results(folder):
    codes = json.loads((folder / "codes.json").read_text())
    spoilt = {codes.pop(f"spoilt.{form}") for form in ("nccl", "csv")}
    assert spoilt == {1} and codes.pop("corrupt.nccl") == 1
    assert len(codes) == 10 and set(codes.values()) == {0}, codes


def test_every_operation_with_every_library(folder):
    lines = (folder / "all.csv").read_text().splitlines()
    facts = [line for line in lines if line.startswith("# ")]
    assert any(line.startswith("# ranks: 2 on 1 node") for line in facts)
    rows = list(csv.DictReader(line for line in lines if not line.startswith("#")))
    seen: dict[tuple[str, str], set[str]] = {}
    for row in rows:
        assert row["wrong"] == ("" if row["library"] == "floor" else "0"), row
        assert 0 < float(row["min_us"]) <= float(row["time_us"]) <= float(row["max_us"]), row
        seen.setdefault((row["operation"], row["type"]), set()).add(row["library"])
    float32 = {name: found for (name, dtype), found in seen.items() if dtype == "float32"}
    assert set(float32) == {
        "all_reduce", "broadcast", "reduce", "all_gather", "all_gather_into_tensor",
        "reduce_scatter_tensor", "all_to_all_single", "gather", "scatter",
    }  # fmt: skip
    assert all(found == EVERY for found in float32.values()), float32
    assert seen["barrier", "none"] == EVERY - {"floor"}
    # NumPy has no bfloat16, so mpi4py has none
    assert seen["all_reduce", "bfloat16"] >= OURS | {"c"}
    assert "mpi4py" not in seen["all_reduce", "bfloat16"]
    assert any("without mpi4py: NumPy has no bfloat16" in line for line in facts)


def test_some_libraries_only_where_they_are_asked_for(folder):
    rows = rows_of(folder / "async.json")
    assert {row["library"] for row in rows} == {"hpcdist-async", "hpcdist-fast"}
    assert len({row["operation"] for row in rows}) == 10
    assert all(row["wrong"] == 0 and row["time_us"] > 0 for row in rows)


def test_sizes_and_bandwidths_count_as_nccl_tests_counts(folder):
    lines = (folder / "all.csv").read_text().splitlines()
    rows = list(csv.DictReader(line for line in lines if not line.startswith("#")))
    big = {
        row["operation"]: row
        for row in rows
        if row["library"] == "c" and row["type"] == "float32" and float(row["size_bytes"]) > 99
    }
    for name, part, factor in (
        ("all_reduce", 2000, 1.0),
        ("broadcast", 2000, 1.0),
        ("all_gather", 1000, 0.5),
        ("reduce_scatter_tensor", 1000, 0.5),
    ):
        row = big[name]
        assert (row["size_bytes"], row["count"]) == ("8000", str(part)), row
        algbw = 8000 / float(row["time_us"]) / 1e3
        assert float(row["algbw_GBps"]) == pytest.approx(algbw)
        assert float(row["busbw_GBps"]) == pytest.approx(algbw * factor)


def test_reduce_operations(folder):
    seen = {
        (row["operation"], row["redop"], row["library"]) for row in rows_of(folder / "ops.json")
    }
    for operation in ("all_reduce", "reduce_scatter_tensor"):
        for redop in ("sum", "avg", "product", "max"):
            assert (operation, redop, "hpcdist") in seen
            assert ((operation, redop, "c") in seen) == (redop != "avg")
    notes = json.loads((folder / "ops.json").read_text())["notes"]
    assert "without c: MPI has no AVG" in notes
    ints = rows_of(folder / "ints.json")
    assert {(row["type"], row["library"]) for row in ints} >= {("int8", "c"), ("bool", "c")}
    assert all(row["wrong"] == 0 or row["library"] == "floor" for row in ints)


def test_osu_has_a_column_for_each_library_and_the_plot_a_line(folder):
    lines = (folder / "table.osu").read_text().splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("# Size"))
    assert lines[at].split()[2:] == ["hpcdist", "hpcdist-off", "c", "floor", "mpi4py", "gloo"]
    assert [line.split()[0] for line in lines[at + 1 :]] == ["8", "64", "512"]
    cells = [float(cell) for line in lines[at + 1 :] for cell in line.split()[1:]]
    assert all(cell > 0 or i % 6 == 3 for i, cell in enumerate(cells))  # a floor may be under 5 ns
    drawn = (folder / "plot.svg").read_text()
    assert drawn.count("<!-- gloo -->") == 1 and "bus bandwidth" in drawn


def test_point_to_point(folder):
    rows = rows_of(folder / "p2p.json")
    assert {(row["operation"], row["library"], row["wrong"]) for row in rows} == {
        (kind, library, 0)
        for kind in ("latency", "bandwidth")
        for library in ("hpcdist", "c", "mpi4py", "gloo")
    }


def test_overlap(folder):
    rows = rows_of(folder / "overlap.json")
    assert [row["library"] for row in rows] == ["hpcdist", "mpi4py", "gloo"]
    for row in rows:
        comm, compute, both = row["comm_ms"], row["compute_ms"], row["both_ms"]
        assert row["hidden"] == pytest.approx((comm + compute - both) / min(comm, compute))
        assert row["over_max"] == pytest.approx(both / max(comm, compute))
        assert row["handoff_us"] > 0 and row["wrong"] == 0


def test_stock_torch(folder):
    rows = rows_of(folder / "torch.json")
    seen = {(row["case"], row["library"]) for row in rows}
    steps = {f"{kind} {model}" for kind in ("DDP", "FSDP2") for model in ("cnn", "tiny")}
    small = {"all_reduce 8", "all_reduce 4K"}
    assert seen == {(case, name) for case in steps | small for name in ("hpcdist", "gloo")} | {
        (case, "native") for case in small
    }
    for row in rows:
        if row["library"] == "hpcdist" and row["case"] in steps:
            assert row["off"] <= 1e-5
        if row["library"] == "native":
            assert row["more_us"] == 0


DDPS = ["hpcdist", "hpcdist view", "gloo", "gloo view"]


def test_training_steps(folder):
    rows = rows_of(folder / "ddp.json")
    assert [(row["model"], row["library"]) for row in rows] == [
        (model, library) for model in ("cnn", "tiny") for library in ("alone", *DDPS)
    ]
    for row in rows:
        tiny, alone = row["model"] == "tiny", row["library"] == "alone"
        assert row["parameters"] == (1000 if tiny else 10) and row["rounds"] == 2
        for part in ("step", "forward", "backward", "optimizer"):
            assert 0 < row[f"{part}_ms"] < 60e3, row
        assert row["peak_mib"] is None or 0 <= row["peak_mib"] < 500
        # What is measured against the bare module is not there for it.
        assert (row["added_ms"] is None) == (row["buckets_ms"] is None) == alone
        assert (row["hook_us"] is None) == (alone or not tiny)
        if not alone:
            base = next(r for r in rows if r["model"] == row["model"] and r["library"] == "alone")
            assert row["added_ms"] == pytest.approx(row["step_ms"] - base["step_ms"])
            assert row["buckets_ms"] > 0 and row["off"] <= 1e-5


def test_parameters_that_come_out_different_are_told_in_any_format(folder):
    lines = (folder / "spoilt.csv").read_text().splitlines()
    rows = list(csv.DictReader(line for line in lines if not line.startswith("#")))
    assert [row["library"] for row in rows] == ["alone", "hpcdist", "spoilt"]
    assert rows[0]["added_ms"] == "" and float(rows[1]["buckets_ms"]) > 0
    text = (folder / "spoilt.nccl").read_text()
    assert "# cnn: three convolutions and two linear layers, batch of 8" in text
    assert "# 1 models with different parameters" in text
    table = [line.split() for line in text.splitlines() if line and line[0] != "#"]
    assert [line[1] for line in table] == ["alone", "hpcdist", "spoilt"], table
    for off in (rows[2]["off"], table[2][-2]):
        assert 0.1 < float(off) < 2


def test_wrong_results_are_counted(folder):
    text = (folder / "corrupt.nccl").read_text()
    (reduced, gathered) = [line for line in text.splitlines() if line.endswith("corrupt")]
    # one element on one of the two ranks, before and after the measurement
    assert reduced.split()[8] == gathered.split()[8] == "2"
    assert "# 4 wrong elements" in text


def test_a_library_that_is_missing_is_named(folder):
    text = (folder / "missing.nccl").read_text()
    assert "# without mpi4py: mpi4py cannot be imported" in text
    assert [line.split()[-1] for line in text.splitlines() if line[0] != "#"] == ["hpcdist"]


@pytest.mark.parametrize("arguments, said", [
    (["-f", "1"], "error: -f 1 must be larger than 1"),
    (["--format", "xml"], "invalid choice: 'xml'"),
    (["ddp", "-m", "resnet"], "invalid choice: 'resnet'"),
])  # fmt: skip
def test_errors_are_printed_once(arguments, said):
    ended = run_job(2, "-m", "hpcdist", "bench", *arguments)
    assert ended.code != 0
    assert ended.text.count(said) == 1, ended.text
    assert "Traceback" not in ended.text


def test_a_world_of_one_says_how_to_start_it():
    variables = ("OMPI_", "PMI", "PRTE_", "MPI_", "HYDRA")
    env = {k: v for k, v in os.environ.items() if not k.startswith(variables)}
    arguments = ["-m", "hpcdist", "bench", "-e", "8", "-n", "1", "-l", "hpcdist"]
    done = subprocess.run(
        [sys.executable, *arguments], env=env, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "mpirun -n 2 python -m hpcdist bench" in done.stdout
