"""The parts of ``python -m hpcdist bench`` that need no ranks."""

from __future__ import annotations

import argparse
import csv
import io
import json
import os

import numpy as np
import pytest
import torch

from hpcdist import cli
from hpcdist.cli.bench import BENCHES, arguments, formats
from hpcdist.cli.bench.busy import busy
from hpcdist.cli.bench.errors import BenchError, Unsupported
from hpcdist.cli.bench.measure import Times
from hpcdist.cli.bench.operations import OPERATIONS, Case, fill_other, pattern, refuse
from hpcdist.dtypes import DTYPES, lookup

pytestmark = [pytest.mark.local, pytest.mark.any_mpi]


@pytest.mark.parametrize("text, value", [
    ("8", 8), ("64K", 65536), ("64k", 65536), ("1.5M", 3 << 19), ("2GiB", 2 << 30), ("7B", 7),
    ("1KB", 1024), ("0", 0),
])  # fmt: skip
def test_size(text, value):
    assert arguments.size(text) == value


@pytest.mark.parametrize("text", ["", "K", "-8", "1.3", "8X", "nan", "inf", "1e999"])
def test_what_is_no_size(text):
    with pytest.raises(argparse.ArgumentTypeError, match="no whole number of bytes"):
        arguments.size(text)


def options(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    arguments.add_sizes(parser)
    return parser.parse_args(words)


def test_sizes():
    assert arguments.sizes(options("-b", "8", "-e", "1K", "-f", "4")) == [8, 32, 128, 512]
    assert arguments.sizes(options("-b", "1", "-e", "4", "-f", "1.1")) == [1, 2, 3, 4]
    assert arguments.sizes(options("-b", "10", "-e", "30", "-i", "10")) == [10, 20, 30]
    assert arguments.sizes(options("-b", "0", "-e", "2")) == [0, 1]
    assert arguments.sizes(options("-b", "0", "-e", "2", "-f", "inf")) == [0]
    assert arguments.sizes(options("-b", "8", "-f", "1e308")) == [8]
    assert arguments.sizes(options("-b", "25M", "-e", "25M")) == [25 << 20]
    assert arguments.sizes(options("--sizes", "1M", "64", "256K", "64")) == [64, 256 << 10, 1 << 20]


@pytest.mark.parametrize("words, said", [
    (("-b", "2K", "-e", "1K"), "larger than -e"), (("-f", "1"), "larger than 1"),
    (("-f", "nan"), "larger than 1"), (("-i", "0"), "at least 1"),
])  # fmt: skip
def test_sizes_that_never_end(words, said):
    with pytest.raises(BenchError, match=said):
        arguments.sizes(options(*words))


def test_times():
    times = Times(np.array([4.0, 1.0, 2.0, 3.0, 100.0]), 7)
    assert (times.median, times.least, times.most) == (3.0, 1.0, 100.0)
    assert times.spread == pytest.approx((4 - 2) / 3)


class Alone:
    """An MpiJob of one rank without MPI."""

    first = True

    def require(self, text):
        if text is not None:
            raise BenchError(text)


COLUMNS = (
    formats.Column("size_bytes", "size", "B", 8),
    formats.Column("time_us", "time", "us", 10, ".2f"),
    formats.Column("library", "library", "", 10),
    formats.Column("calls"),
)


def table(form: str, path) -> formats.Table:
    made = formats.Table(Alone(), COLUMNS, form, str(path))
    made.begin({"ranks": "1"})
    made.section("work", formats.Pivot("size_bytes", "library", "time_us"), ["ours", "theirs"])
    for size in (8, 16):
        made.row({"size_bytes": size, "time_us": 1.234, "library": "ours", "calls": 3})
        if size == 16:
            row = {"size_bytes": size, "time_us": None, "library": "theirs", "calls": 3}
            made.row(row)
    made.note("well")
    made.end()
    return made


def test_nccl(tmp_path):
    table("nccl", tmp_path / "t")
    lines = (tmp_path / "t").read_text().splitlines()
    assert lines[0] == "# ranks: 1" and lines[2] == "# work" and lines[-1] == "# well"
    assert lines[4].split() == ["#", "size", "time", "library"]
    assert lines[5].split() == ["#", "(B)", "(us)"]
    assert lines[6] == f"{8:>8}{'1.23':>10}{'ours':>10}"
    assert lines[8].split() == ["16", "N/A", "theirs"]


def test_osu(tmp_path):
    table("osu", tmp_path / "t")
    lines = (tmp_path / "t").read_text().splitlines()
    assert lines[2:5] == [
        "# work, us",
        f"{'# Size':<12}{'ours':>20}{'theirs':>20}",
        f"{8:<12}{'1.23':>20}{'N/A':>20}",
    ]
    assert lines[5].split() == ["16", "1.23", "N/A"] and lines[6] == "# well"


def test_csv(tmp_path):
    table("csv", tmp_path / "t")
    text = (tmp_path / "t").read_text()
    rows = list(csv.DictReader(io.StringIO("".join(
        line for line in text.splitlines(keepends=True) if not line.startswith("#")
    ))))  # fmt: skip
    assert rows[0] == {"size_bytes": "8", "time_us": "1.234", "library": "ours", "calls": "3"}
    assert rows[2]["time_us"] == ""


def test_json(tmp_path):
    made = table("json", tmp_path / "t")
    whole = json.loads((tmp_path / "t").read_text())
    assert whole == {"facts": {"ranks": "1"}, "notes": ["well"], "rows": made.rows}
    assert len(made.rows) == 3 and made.rows[2]["time_us"] is None


def test_a_file_that_cannot_be_written(tmp_path):
    with pytest.raises(BenchError, match="cannot write"):
        formats.Table(Alone(), COLUMNS, "nccl", str(tmp_path / "no" / "t"))


def test_short():
    assert [formats.short(n) for n in (8, 1024, 1536, 25 << 20, 1 << 30)] == [
        "8", "1K", "1.5K", "25M", "1G",
    ]  # fmt: skip


def test_ranks_and_blocks_have_different_patterns():
    a, b = pattern(0, 5000), pattern(1, 5000)
    assert set(a) == set(b) == set(range(8)) and (a != b).mean() > 0.8
    assert (a[:2500] != a[2500:]).mean() > 0.8
    long = pattern(3, 3_000_000)
    assert (long[:1000] != long[1 << 20 : (1 << 20) + 1000]).mean() > 0.8


#: What each operation leaves on the ranks, from what all send: NumPy, straight from its definition.
EXPECTED = {
    "all_reduce": lambda sent, rank, part: sum(sent),
    "broadcast": lambda sent, rank, part: sent[1],
    "all_gather": lambda sent, rank, part: np.concatenate(sent),
    "all_gather_into_tensor": lambda sent, rank, part: np.concatenate(sent),
    "gather": lambda sent, rank, part: np.concatenate(sent),
    "reduce_scatter_tensor": lambda sent, rank, part: sum(sent)[rank * part : (rank + 1) * part],
    "scatter": lambda sent, rank, part: sent[1][rank * part : (rank + 1) * part],
    "all_to_all_single": lambda sent, rank, part: np.concatenate(
        [each[rank * part : (rank + 1) * part] for each in sent]
    ),
    "reduce": lambda sent, rank, part: sum(sent),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_expected_results(name):
    """A right result has nothing wrong; an untouched one is wrong everywhere."""
    cases = [Case(OPERATIONS[name], 400, lookup("float32"), "SUM", 1, rank, 3) for rank in range(3)]
    for case in cases:
        case.fill()
    sent = [case.send.numpy().copy() for case in cases]
    for rank, case in enumerate(cases):
        if name in ("reduce", "gather") and rank != 1:
            assert case.wrong() == 0  # not its to receive
            continue
        want = EXPECTED[name](sent, rank, case.part)
        before = case.wrong()
        changed = int((torch.from_numpy(want.copy()) != case.recv).sum())
        assert before == changed and (before > 0.5 * len(want) or rank == 1)
        case.recv.copy_(torch.from_numpy(want.copy()))
        assert case.wrong() == 0
        case.recv[-1] += 1
        assert case.wrong() == 1


@pytest.mark.parametrize("dtype", [dtype.name for dtype in DTYPES])
def test_what_is_filled_is_different_everywhere(dtype):
    case = Case(OPERATIONS["all_gather"], 480, lookup(dtype), "none", 0, 0, 3)
    case.fill()
    assert case.wrong() == case.total
    copy = case.recv.clone()
    fill_other(copy, case.recv)
    width = copy.element_size()
    a, b = (each.view(torch.uint8).view(-1, width) for each in (copy, case.recv))
    assert bool((a != b).any(1).all())


def test_what_no_library_can_do():
    case = Case(OPERATIONS["all_reduce"], 8, lookup("float32"), "BAND", 0, 0, 2)
    with pytest.raises(Unsupported, match="BAND has no meaning for float32"):
        refuse(case)


@pytest.mark.parametrize("name", ["", *BENCHES])
def test_help_names_all_benches(name, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", *([name] if name else []), "-h"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert "mpirun -n 2 python -m hpcdist bench" in text
    assert all(f"  {bench} " in text for bench in BENCHES)


@pytest.mark.parametrize("name, count, elements", [
    ("mlp", 10, 25_099_200), ("cnn", 10, 620_362), ("tiny", 1000, 8000),
    ("transformer", 28, 429_408),
])  # fmt: skip
def test_the_modules_that_are_trained_are_what_they_are_called(name, count, elements):
    from hpcdist.cli.bench.ddp_models import MODELS

    torch.manual_seed(0)
    _, module, batch = MODELS[name]
    made = module()
    sizes = [p.numel() for p in made.parameters()]
    assert (len(sizes), sum(sizes)) == (count, elements)
    made(batch()).square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in made.parameters())


def test_busy_processes_end_with_the_bench():
    with busy(2) as two:
        assert len(two) == 2 and all(process.poll() is None for process in two)
    assert all(process.poll() is not None for process in two)
    with busy(0) as none:
        assert none == []


def test_gloo_beside_hpcdist_is_not_hpcdist(monkeypatch, capsys):
    """A job script may export that hpcdist serves gloo."""
    monkeypatch.setenv("HPCDIST_TAKE_OVER", "gloo")
    with pytest.raises(SystemExit):
        cli.main(["bench", "ddp", "--help"])
    assert "HPCDIST_TAKE_OVER" not in os.environ
    assert "HPCDIST_TAKE_OVER is not used" in capsys.readouterr().err
