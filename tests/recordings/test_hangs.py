"""Which ranks of a running job wait for which, and which of them arrive last."""

from __future__ import annotations

from typing import Any

import pytest
from made_recordings import BEGIN, MS, operation, recording

from hpcdist.recordings import rows as rows_module
from hpcdist.recordings.hangs import arrivals, hangs
from hpcdist.recordings.rows import SeveralJobsError, row_of, rows_of, where

pytestmark = [pytest.mark.local, pytest.mark.any_mpi]


def rows(*ranks: list[tuple[float, dict[str, Any]]], at: float = 5000.0) -> list[dict[str, Any]]:
    """The rows of a job's ranks; each has its calls by when they were made."""
    found = []
    for rank, calls in enumerate(ranks):
        one = recording(
            rank,
            len(ranks),
            lambda group, calls=calls: [
                operation(group, n, ms, **more) for n, (ms, more) in enumerate(calls, 1)
            ],
            seen=at,
            alive=True,
        )
        found.append(row_of(one, one.seen))
    return found


OPEN = {"state": "running"}


def test_who_waits_for_whom():
    (one,) = hangs(rows([(0, {}), (2000, OPEN)], [(0, {})], [(0, {}), (1500, OPEN)]))
    assert (one["group"], one["number"], one["missing"]) == ("world", 2, [1])
    assert one["waiting"] == [0, 2] and one["seconds"] == pytest.approx(3.5)
    (call,) = one["calls"]
    assert call["ranks"] == [0, 2] and "at me/train.py:40 in step" in call["call"]


def test_ranks_that_wait_in_different_calls():
    other = {**OPEN, "name": "broadcast", "op": "", "kind": "broadcast"}
    (one,) = hangs(rows([(0, OPEN)], [(0, other)]))
    assert one["missing"] == [] and len(one["calls"]) == 2


def test_what_has_not_waited_long_and_messages_do_not_count():
    assert hangs(rows([(4500, OPEN)], [])) == []
    assert hangs(rows([(0, {**OPEN, "kind": "recv", "name": "recv", "peer": 1})], [])) == []


def test_the_collectives_of_the_start_are_not_the_programs_first():
    start = [(0, {"name": "init_process_group", "seq": n}) for n in (1, 2)]
    (one,) = hangs(rows([*start, (1000, {**OPEN, "seq": 1})], start))
    assert (one["group"], one["number"], one["missing"]) == ("world", 1, [1])
    (one,) = hangs(rows([*start, (1000, {**OPEN, "seq": 2})], [*start, (0, {"seq": 1})]))
    assert (one["number"], one["missing"]) == (2, [1])
    (one,) = hangs(rows([start[0], (0, {**start[1][1], **OPEN})], start[:1]))
    assert (one["number"], one["missing"]) == (2, [1])  # a rank that is missed in the start itself


def test_who_arrives_last():
    calls = rows([(0, {}), (10, {}), (30, {})], [(1, {}), (18, {}), (30, {})])
    table, seconds, newest = arrivals(calls)
    assert table[1]["waited"] == pytest.approx(0.009) and table[1]["times"] >= 2
    assert table[0]["waited"] == 0 and table[0]["of"] == 3
    assert (seconds, newest) == (pytest.approx(0.030), BEGIN + 30 * MS)
    table, seconds, again = arrivals(calls, newest)  # nothing is counted twice
    assert table[1]["of"] == seconds == 0 and again == newest
    queued = rows([(0, {"queued": True})], [(9, {"queued": True})])
    assert arrivals(queued)[0][1]["waited"] == 0  # an asynchronous call holds up no rank


def test_where_the_main_thread_is(tmp_path):
    stacks = (
        "Thread 0x00007f (most recent call first):\n"
        '  File "/usr/lib/queue.py", line 1 in get\n'
        "Thread 0x00008f (most recent call first):\n"
        '  File "PACKAGE/collectives/barrier.py", line 9 in barrier\n'
        '  File "/opt/lib/python3.11/site-packages/torch/distributed/c10d.py", line 7 in barrier\n'
        '  File "/home/me/hpcdist/train.py", line 12 in load\n'
        '  File "/home/me/torch/distributed/main.py", line 64 in main\n'
        "Main thread, native:\n"
    )
    (tmp_path / "hpcdist" / "recordings").mkdir(parents=True)
    (tmp_path / "hpcdist" / "recordings" / "rows.py").touch()  # not installed: PYTHONPATH has it
    for package in ("/opt/lib/python3.11/site-packages/hpcdist", tmp_path / "hpcdist"):
        # a program may lie in a folder of the library's name
        said = where(stacks.replace("PACKAGE", str(package)))
        assert said == "hpcdist/train.py:12 in load < distributed/main.py:64 in main"
    assert where("") == where("nothing") == ""


def test_a_pid_that_an_earlier_job_had(monkeypatch):
    """The kernel gives numbers of processes again: the one that lives is meant."""
    ours, theirs = (recording(0, 1, lambda _: [], alive=alive) for alive in (True, False))
    theirs.job = "ffffffff"
    monkeypatch.setattr(rows_module, "_all_here", lambda: [theirs, ours])
    (row,) = rows_of("100", stacks=False)
    assert row["job"] == ours.job
    assert rows_of("ffffffff", stacks=False)[0]["job"] == theirs.job
    ours.alive = False
    with pytest.raises(SeveralJobsError, match="ffffffff"):
        rows_of("100", stacks=False)
