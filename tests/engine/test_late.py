"""The warning about a rank that makes the others wait: once, with numbers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from jobs import run_job
from patience import at_most

pytestmark = pytest.mark.jobs

#: A rank that takes longer than the others in each step; `how` is one of the functions.
PROGRAM = """
import sys, time, numpy as np, hpcdist as d
d.init_process_group()
rank, late, how = d.get_rank(), int(sys.argv[2]), sys.argv[1]
pair = d.new_group([0, 2]) if how == "pair" else None
x = np.ones(3)
until = time.time() + 4
while x[0]:
    time.sleep(0.03 if rank == late else 0.005)
    if how == "pair" and rank == 1:
        pass
    elif how == "asynchronous":
        works = []
        for _ in range(4):
            works.append(d.all_reduce(np.ones(9), async_op=True))
            time.sleep(0.01 if rank == late else 0.004)
        for work in works:
            work.wait()
    else:
        d.all_reduce(np.ones(9), group=pair)
    if rank in (0, 2 if how == "pair" else 1) or how != "pair":
        x[0] = time.time() < until
    if how == "pair":
        d.broadcast(x, 0, group=pair) if rank != 1 else time.sleep(0.01)
        if rank == 1:
            x[0] = time.time() < until
    else:
        d.broadcast(x, 0)
d.barrier()
"""
SAID = re.compile(
    r"\[hpcdist rank (\d) of \d\] warning: rank (\d) of group '([^']+)'"
    r"(?: \(rank (\d) of the job\))? makes the others wait: in the last ([\d.]+) s "
    r"rank \d waited ([\d.]+) s for it "
    r"\((\d+) %\) in (\d+) collectives, at most ([\d.]+) s in one"
)


def warnings(how: str, np: int = 2, late: int = 1, **env: str) -> list[tuple[str, ...]]:
    more = {"HPCDIST_STRAGGLER_WINDOW": "1", **env}
    ended = run_job(np, "-c", PROGRAM, how, str(late), env=more)
    assert ended.code == 0, ended.text
    found = SAID.findall(ended.text)
    assert ended.text.count("makes the others wait") == len(found), ended.text
    return found


@pytest.mark.parametrize("transport", ["auto", "mpi"], ids=["page", "messages"])
def test_it_is_named_once_with_numbers(transport):
    (said,) = warnings("simple", HPCDIST_CHECK_TRANSPORT=transport)
    by, late, group, _, window, waited, percent, times, worst = said
    assert (by, late, group) == ("0", "1", "world")
    assert 0.9 < float(window) < 3 and 0.25 * float(window) < float(waited) <= float(window)
    assert abs(float(percent) - 100 * float(waited) / float(window)) < 2
    assert int(times) > 5 and 0.015 < float(worst) <= float(waited)


def test_asynchronous_operations():
    (said,) = warnings("asynchronous", HPCDIST_STRAGGLER="0.2")
    assert said[1] == "1"


def test_in_a_smaller_group():
    (said,) = warnings("pair", np=3, late=2)
    assert (said[0], said[1], said[3]) == ("0", "1", "2")


def test_where_it_is_silent():
    # all take the same time, unless other programs use the cores
    assert warnings("simple", late=7, HPCDIST_STRAGGLER="0.7") == []
    assert warnings("simple", HPCDIST_STRAGGLER="0") == []
    assert warnings("simple", HPCDIST_STRAGGLER="0.99") == []


@pytest.mark.parametrize("what", ["late", "recorder"])
def test_a_full_standard_error_holds_no_watchdog(what):
    program = str(Path(__file__).with_name("full_stderr.py"))
    env = {"HPCDIST_STRAGGLER_WINDOW": "1"} if what == "late" else {"HPCDIST_DUMP": "/proc/none"}
    ended = run_job(2, program, what, limit=30, env=env)
    assert ended.code == 0, ended.text
    said = re.search(r"timeout True, ([\d.]+) s, (\d+) ticks", ended.text)
    assert said, ended.text
    assert float(said[1]) < 2 + at_most(1.5) and int(said[2]) > 0, ended.text
