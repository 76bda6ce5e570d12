"""Traces of several ranks become one."""

from __future__ import annotations

import copy
import gzip
import json
import os

import pytest

from hpcdist.cli import main
from hpcdist.cli.merge_traces import merge

pytestmark = [pytest.mark.local, pytest.mark.any_mpi]


def span(name, ts, dur, pid=4711, tid=4711):
    return {"ph": "X", "cat": "x", "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": dur}


def trace(base=1_000_000):
    return {
        "baseTimeNanoseconds": base,
        "schemaVersion": 1,
        "traceEvents": [
            {"ph": "M", "name": "process_name", "pid": 4711, "tid": 0, "args": {"name": "python"}},
            {"ph": "M", "name": "process_labels", "pid": 4711, "tid": 0, "args": {"labels": "CPU"}},
            {"ph": "M", "name": "thread_name", "pid": 4711, "tid": 4711, "args": {"name": "main"}},
            span("hpcdist::all_reduce (8 B, world, async)", 10.0, 50.0),
            span("hpcdist::all_reduce (8 B, world, async)", 20.0, 10.0),
            span("hpcdist::isend (8 B, world, to 1)", 70.0, 10.0),
            span("aten::mm", 15.0, 30.0),
            span("hpcdist::all_reduce (8 B, world)", 80.0, 5.0),
            {"ph": "s", "id": 3, "pid": 4711, "tid": 4711, "ts": 10.0, "cat": "a", "name": "a"},
            {"ph": "f", "id": 3, "pid": 0, "tid": 7, "ts": 11.0, "cat": "a", "name": "a"},
            {"ph": "i", "name": "Spans", "pid": "Spans", "tid": "x", "ts": 1.0, "s": "g"},
        ],
    }


def test_ranks_get_processes_of_their_own():
    """Two ranks may well have the same process id, on two hosts."""
    events = merge([trace(), trace(base=3_000_000)])["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert sorted(names.values()) == ["rank 0: process 0", "rank 0: process 4711 CPU",
                                      "rank 1: process 0", "rank 1: process 4711 CPU"]  # fmt: skip
    assert len(names) == 4 and not any(e["name"] == "process_labels" for e in events)
    multiplied = [e for e in events if e["name"] == "aten::mm"]
    # rank 1's profiler began to count 2 ms later
    assert [e["ts"] for e in multiplied] == [15.0, 2015.0]
    assert ["rank 0" in names[e["pid"]] for e in multiplied] == [True, False]
    assert sorted(str(e["id"]) for e in events if "id" in e) == ["0.3", "0.3", "1.3", "1.3"]


def test_nothing_is_lost():
    one = trace()
    kept = [e["name"] for e in one["traceEvents"] if not e["name"].startswith("process_")]
    merged = merge([copy.deepcopy(one), copy.deepcopy(one)])
    names = [e["name"] for e in merged["traceEvents"]]
    assert all(names.count(name) >= 2 * kept.count(name) for name in set(kept))
    assert merged["schemaVersion"] == 1


def test_the_command(tmp_path, capsys):
    (tmp_path / "t0.json").write_text(json.dumps(trace()))
    with gzip.open(tmp_path / "t1.json.gz", "wt") as file:
        json.dump(trace()["traceEvents"], file)
    (tmp_path / "bad.json").write_text('{"events": []}')
    out = tmp_path / "all.json.gz"
    first, second = str(tmp_path / "t0.json"), str(tmp_path / "t1.json.gz")
    assert main(["merge-traces", str(out), first, second]) == 0
    assert "2 ranks" in capsys.readouterr().out
    with gzip.open(out, "rt") as file:
        assert len(json.load(file)["traceEvents"]) > 20
    (tmp_path / "numbers.json").write_text("[1, 2]")
    for bad in ("bad.json", "missing.json", "numbers.json"):
        assert main(["merge-traces", str(out), first, str(tmp_path / bad)]) == 1
        assert bad in capsys.readouterr().err
    assert main(["merge-traces", str(tmp_path / "no" / "where.json"), first]) == 1
    assert {path.name for path in tmp_path.iterdir()} == {
        "t0.json", "t1.json.gz", "bad.json", "numbers.json", "all.json.gz",
    }  # fmt: skip
    with pytest.raises(SystemExit):
        main(["merge-traces", str(out)])


#: What an interrupted or foreign writer leaves.
BAD = {
    "cut.json.gz": gzip.compress(json.dumps(trace()).encode())[:-12],
    "damaged.json.gz": b"".join(
        (gzip.compress(json.dumps(trace()).encode())[:20], bytes(60), b"end")
    ),
    "base.json": json.dumps(trace(base="soon")).encode(),
    "time.json": json.dumps({"traceEvents": [{"pid": 1, "ts": "1.5"}]}).encode(),
    "deep.json": b"[" * 200_000,
}


@pytest.mark.parametrize("name", BAD)
def test_a_damaged_trace_is_one_line(name, tmp_path, capsys):
    """Each was a traceback."""
    path = tmp_path / name
    path.write_bytes(BAD[name])
    assert main(["merge-traces", str(tmp_path / "all.json"), str(path)]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"hpcdist merge-traces: {path}: ") and said.count("\n") == 1


def test_a_process_without_labels():
    event = {"ph": "M", "name": "process_labels", "pid": 1, "args": None}
    named = merge([{"traceEvents": [event]}])["traceEvents"][0]
    assert named["args"] == {"name": "rank 0: process 1"}


def test_pipes_and_links_stay(tmp_path):
    """As /dev/stdout is one, which root could lose."""
    source, pipe, link = tmp_path / "t", tmp_path / "pipe", tmp_path / "link"
    source.write_text(json.dumps(trace()))
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    assert main(["merge-traces", str(pipe), str(source)]) == 0
    assert json.loads(os.read(reader, 1 << 16)) == merge([trace()])
    os.close(reader)
    (tmp_path / "elsewhere").mkdir()
    link.symlink_to("elsewhere/there")
    assert main(["merge-traces", str(link), str(source)]) == 0
    assert link.is_symlink() and (tmp_path / "elsewhere" / "there").is_file()
