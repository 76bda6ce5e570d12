"""Copies of the recorders of a job that failed: read by ``analyze`` and by ``torchfrtrace``."""

from __future__ import annotations

import contextlib
import io
import json
import pickle
from pathlib import Path

import pytest
from jobs import run_job

from hpcdist.cli import main

pytestmark = pytest.mark.jobs

HANGS = str(Path(__file__).with_name("hangs.py"))


@pytest.fixture
def dumps(tmp_path):
    """The copies of a job with a timeout and a mismatch."""
    folder = tmp_path / "dumps"
    env = {"HPCDIST_DUMP": str(folder)}
    ended = run_job(2, HANGS, "late_all_reduce", "other_operation", env=env)
    assert ended.code == 0, ended.text
    return folder


def test_analyze_names_the_first_divergence(dumps, tmp_path, capsys):
    assert main(["analyze", str(dumps), "--html", str(tmp_path / "page.html")]) == 3
    text = capsys.readouterr().out
    first = text.split("First divergence: ")[1].split("\n")
    assert first[0] == "collective #2 of group 'world': the ranks called different things"
    # rank 1 came later, with another call: the texts have both lines
    assert first[1].startswith("  rank 0: all_reduce #2 of group 'world', float32[6], SUM, at")
    assert first[1].endswith("in late_all_reduce: timeout")
    assert first[2].startswith("  rank 1: barrier #2 of group 'world', at recordings/hangs.py:")
    assert (tmp_path / "page.html").stat().st_size > 5000
    assert main(["analyze", str(dumps), "--json", "--trace", str(tmp_path / "trace.json")]) == 3
    found = json.loads(capsys.readouterr().out)
    assert found["ranks"] == 2 and not found["missing_ranks"]
    assert [one["rank"] for one in found["processes"]] == [0, 1]
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events if event["ph"] == "X"} == {9_000_000, 19_000_000}


def test_torchfrtrace_reads_them(dumps, tmp_path):
    from torch.distributed.flight_recorder import fr_trace

    folder = tmp_path / "traces"
    folder.mkdir()
    with contextlib.redirect_stdout(io.StringIO()):
        main(["analyze", str(dumps), "--frtrace", f"{folder}/trace_"])
        fr_trace.main([str(folder), "-p", "trace_", "-o", str(tmp_path / "db")])
    with open(tmp_path / "db", "rb") as file:
        _, said = pickle.load(file)
    assert {group.desc for group in said.groups} == {"world"}
    wrong = [one for one in said.collectives if not one.pass_check]
    assert wrong and wrong[0].collective_seq_id == 2
