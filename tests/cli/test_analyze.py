"""The analysis of flight recorders: divergence, lateness, bandwidth; as text, page and trace."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
from made_recordings import BEGIN, MS, operation, recording

from hpcdist.cli import main
from hpcdist.cli.analyze import load, printable
from hpcdist.cli.analyze.trace import merged
from hpcdist.recordings import Group, Operation, Recording, Site
from hpcdist.recordings.analysis.bars import timeline
from hpcdist.recordings.analysis.match import collectives, divergences
from hpcdist.recordings.analysis.page import page
from hpcdist.recordings.analysis.report import analysis
from hpcdist.recordings.analysis.text import lines, ranks_in_words
from hpcdist.recordings.frtrace import as_frtrace

pytestmark = [pytest.mark.local, pytest.mark.any_mpi]


def call(number: int, group: Group, ms: float, **more: object) -> Operation:
    """A call of a line of its own that took a millisecond."""
    ended = BEGIN + int((ms + 1) * MS)
    given = {"ended": ended, "site": Site("/home/me/train.py", 40 + number, "step"), **more}
    return operation(group, number, ms, **given)


def job(*ranks: list[dict[str, Any]], first: int = 1) -> list[Recording]:
    """A job of one group; each rank's calls by when they were made, and what is special."""
    return [
        recording(
            rank,
            len(ranks),
            lambda group, calls=calls: [call(first + n, group, **c) for n, c in enumerate(calls)],
        )
        for rank, calls in enumerate(ranks)
    ]


def test_ranks_that_agree():
    recordings = job([{"ms": 0}, {"ms": 10}], [{"ms": 0}, {"ms": 10}])
    assert divergences(recordings) == []
    text = "\n".join(lines(analysis(recordings)))
    assert "No divergence" in text and "job 0a0b0c0d, 2 ranks" in text


def test_the_rank_that_did_not_come():
    waits = {"state": "failed", "failure": "timeout", "ended": BEGIN + 2000 * MS}
    recordings = job(
        [{"ms": 0}, {"ms": 10, **waits}], [{"ms": 0}], [{"ms": 0}, {"ms": 12, **waits}]
    )
    (one,) = divergences(recordings)
    assert (one.kind, one.collective.seq, one.collective.absent) == ("absent", 2, [1])
    text = "\n".join(lines(analysis(recordings)))
    assert "First divergence: collective #2 of group 'world': not all ranks called it" in text
    assert (
        "ranks 0, 2: all_reduce #2 of group 'world', float32[1000], SUM, at me/train.py:42" in text
    )
    assert "  rank 1: has not called it" in text


def test_ranks_without_a_recorder_are_not_spoken_of():
    bad = {"state": "failed", "failure": "timeout", "ended": BEGIN + 2000 * MS}
    recordings = job([{"ms": 0}], [{"ms": 0, **bad}], [{"ms": 0, **bad}])[1:]
    (said,) = analysis(recordings)["divergences"]
    assert (said["kind"], said["unknown"]) == ("failed", [0])
    text = "\n".join(lines(analysis(recordings)))
    assert "group 'world': the ranks whose call is known all called it, and it failed" in text
    assert "  rank 0: its call is not recorded" in text and "no recorder of rank 0" in text
    whole = "\n".join(lines(analysis(job([{"ms": 0, **bad}], [{"ms": 0, **bad}]))))
    assert "group 'world': all ranks called it, and it failed" in whole
    assert "not recorded" not in whole
    agreeing = "\n".join(lines(analysis(job([{"ms": 0}], [{"ms": 0}])[:1])))
    assert "No divergence: the ranks with a recorder called the same collectives" in agreeing


def test_the_collectives_of_the_start_are_not_the_programs_first():
    start = [{"ms": n, "name": "init_process_group", "seq": n + 1} for n in (0, 1)]
    waits = {"ms": 9, "seq": 1, "state": "running", "ended": None}
    recordings = job([*start, waits], start)
    (one,) = divergences(recordings)
    assert (one.kind, one.collective.seq, one.collective.absent) == ("absent", 1, [1])
    for one in recordings:  # whatever else the ranks have done
        one.operations += [call(3, one.groups[0], 8, seq=0, kind="recv")]
    (one,) = divergences(recordings)
    assert (one.kind, one.collective.absent) == ("absent", [1])
    entries = as_frtrace(recordings[0])["entries"]
    assert [e["collective_seq_id"] for e in entries if not e["is_p2p"]] == [1]


@pytest.mark.parametrize("other", [{"state": "running"}, {}], ids=["killed in it", "done"])
def test_a_barrier_that_failed_on_some_ranks_is_the_same_barrier(other):
    """Like a refused call it has no tensor."""
    barrier = {"ms": 0, "name": "barrier", "kind": "barrier", "dtype": "", "elements": 0}
    bad = {**barrier, "state": "failed", "failure": "peer died"}
    (one,) = divergences(job([bad], [{**barrier, **other}], [bad]))
    assert one.kind == "failed"
    refused = {**bad, "name": "all_reduce", "kind": "all_reduce"}
    (one,) = divergences(job([refused], [{**barrier, **other}]))
    assert one.kind == "mismatch"


def test_ranks_that_called_different_things():
    other = {"name": "broadcast", "kind": "broadcast", "op": "", "peer": 0}
    recordings = job(
        [{"ms": 0}, {"ms": 5}, {"ms": 9}], [{"ms": 0}, {"ms": 6, **other}, {"ms": 9, **other}]
    )
    (one,) = divergences(recordings)
    assert (one.kind, one.collective.seq) == ("mismatch", 2)
    (said,) = analysis(recordings)["divergences"]
    assert [each["ranks"] for each in said["calls"]] == [[0], [1]]
    assert "broadcast #2" in said["calls"][1]["call"]


def test_sizes_may_differ_where_ranks_may_choose_them():
    uneven = {"name": "all_to_all_single", "kind": "all_to_all"}
    recordings = job([{"ms": 0, **uneven}], [{"ms": 0, **uneven, "elements": 7, "shape": (7,)}])
    assert divergences(recordings) == []


def test_what_a_ring_has_overwritten_is_not_missing():
    """Rank 1 made more calls of other groups, so its recorder reaches less far back."""
    recordings = job([{"ms": n} for n in range(6)], [{"ms": n} for n in range(6)], first=100)
    del recordings[1].operations[:4]
    del recordings[0].operations[0]
    assert divergences(recordings) == []
    assert [one.absent for one in collectives(recordings)] == [[]] * 5


def test_who_was_late_and_by_how_much():
    """Rank 2 comes 50 ms late to each of ten calls, 100 ms apart."""
    times = [[{"ms": 100 * n + (50 if rank == 2 else 0)} for n in range(10)] for rank in range(3)]
    found = analysis(job(*times))["waits"]
    assert [one["straggler"] for one in found] == [False, False, True]
    assert found[2]["others_waited"] == pytest.approx(0.5) and found[2]["times_last"] == 10
    assert found[0]["waited"] == pytest.approx(0.5) and found[2]["waited"] == 0
    assert found[2]["worst"] == pytest.approx(0.05)


def test_one_delay_counts_once_in_asynchronous_calls():
    """Rank 1 begins 5 ms late; each of its 20 calls is as late. Then the ranks meet."""

    def calls(late: float, queued: bool = True) -> list[dict[str, Any]]:
        made = [{"ms": 10 * n + late, "queued": queued} for n in range(20)]
        return [*made, {"ms": 300}, {"ms": 400 + late, "queued": queued}]

    first, second = analysis(job(calls(0), calls(5)))["waits"]
    assert (first["others_waited"], first["waited"], second["waited"]) == (0, 0, 0)
    assert second["others_waited"] == pytest.approx(0.010) and second["times_last"] == 22
    assert second["worst"] == pytest.approx(0.005) and not second["straggler"]
    # in calls that wait, each is a wait of its own
    assert analysis(job(calls(0, False), calls(5)))["waits"][1]["straggler"]
    # a rank that falls further and further behind; the last of three need not be the same
    three = job(
        *([{"ms": 10 * n + n * late, "queued": True} for n in range(9)] for late in (0, 1, 3))
    )
    assert analysis(three)["waits"][2]["others_waited"] == pytest.approx(0.016)
    three = job(
        *(
            [{"ms": 10 * n + (n % 3 == late), "queued": True} for n in range(9)]
            for late in (0, 1, 2)
        )
    )
    assert [one["others_waited"] for one in analysis(three)["waits"]] == [pytest.approx(0.003)] * 3


def test_bandwidth_counts_from_when_all_have_arrived():
    size = {"elements": 1_000_000, "outputs": 1_000_000, "shape": (1_000_000,)}
    ended = BEGIN + 30 * MS
    recordings = job([{"ms": 0, **size, "ended": ended}], [{"ms": 20, **size, "ended": ended}])
    rows = analysis(recordings)["operations"]
    for row in rows:
        assert row["moved"] == pytest.approx(0.010) and row["bandwidth"] == pytest.approx(4e8)
    assert [row["waited"] for row in rows] == [pytest.approx(0.020), 0]


def test_page_and_trace(tmp_path):
    hostile = {"site": Site("/tmp/</script><b>@TEXT@.py", 1, "<x>")}
    recordings = job([{"ms": 0, **hostile}, {"ms": 10}], [{"ms": 0}, {"ms": 12, "ended": None}])
    recordings[0].stacks = "File </pre><script>alert(1)</script>"
    found = page(analysis(recordings), timeline(recordings))
    assert found.count("<script") == 2 and "<b>" not in found and "@" not in found.split("<pre")[0]
    data = found.split('id="data" type="application/json">')[1].split("</script>")[0]
    bars = json.loads(data)["bars"]
    assert len(bars) == 4 and bars[0]["text"].count("</script>") == 1
    assert "http" not in found  # it loads nothing
    merged(tmp_path / "out.json.gz", recordings, [])
    merged(tmp_path / "plain.json", recordings, [])
    events = json.loads((tmp_path / "plain.json").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert len(spans) == 4 and {event["ts"] for event in spans} == {0, 10_000, 12_000}
    # the profiler's own trace began a second later
    profile = {"baseTimeNanoseconds": BEGIN + 1000 * MS, "traceEvents": [
        {"ph": "X", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 5.0, "dur": 1.0}]}  # fmt: skip
    (tmp_path / "p0.json").write_text(json.dumps(profile))
    merged(tmp_path / "both.json", recordings, [tmp_path / "p0.json"])
    events = json.loads((tmp_path / "both.json").read_text())["traceEvents"]
    by_name = {event["name"]: event["ts"] for event in events if event["ph"] == "X"}
    assert by_name["aten::mm"] == 5.0
    (tmp_path / "p1.json").write_text("[1")
    with pytest.raises(ValueError, match=r"p1\.json: "):  # which of them
        merged(tmp_path / "both.json", recordings, [tmp_path / "p0.json", tmp_path / "p1.json"])
    assert min(e["ts"] for e in events if e["name"] == "all_reduce") == -1_000_000


def test_words():
    assert ranks_in_words([3]) == "rank 3" and ranks_in_words([0, 1, 2, 5]) == "ranks 0-2, 5"


def test_nothing_to_read(tmp_path, capsys):
    assert main(["analyze", str(tmp_path)]) == 1
    assert "no file of hpcdist's flight recorder" in capsys.readouterr().err
    assert main(["analyze", str(tmp_path / "none")]) == 1
    (tmp_path / "text").write_text("hello")
    with pytest.raises(ValueError, match="no file"):
        load(tmp_path, None)


def test_profiles_without_a_trace_are_refused(tmp_path, capsys):
    assert main(["analyze", str(tmp_path), "--profiles", "trace0.json"]) == 2
    assert "--profiles needs --trace FILE" in capsys.readouterr().err


def test_a_folder_with_a_fifo_is_no_trap(tmp_path):
    """Opening one waits until somebody writes to it."""
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(ValueError, match="no file"):
        load(tmp_path, None)


def test_names_that_a_terminal_would_obey_are_shown():
    shown = printable("train\x1b]0;pwn\x07.py, line 3\n\tstep \u2028 \x9b2J\u00e9")
    assert shown == "train\\x1b]0;pwn\\x07.py, line 3\n\tstep \\u2028 \\x9b2J\u00e9"
