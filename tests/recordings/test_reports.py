"""The hang report and the error texts: without a setting they name rank, operation and line."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest
from jobs import run_job
from long_form import LONG, deadline
from recorded_jobs import SLEEPER, pids_of, start, wait_till_hung

from hpcdist.recordings import find, folder_of_user, read

pytestmark = [pytest.mark.jobs, pytest.mark.rare]

PROGRAM = Path(__file__).with_name("hangs.py")
LINES = PROGRAM.read_text().splitlines()

#: Kinds that share a job. A node writes a report every 20 s at most: the first of each.
JOBS = (
    ("late_all_reduce", "other_size", "refused"),
    ("late_in_c", "other_operation"),
    ("late_computing", "other_root"),
    ("no_send", "other_reduction"),
    ("crossed", "other_dtype"),
)


def lines_of(mark: str, kind: str, program: Path = PROGRAM) -> list[int]:
    """The lines of the program with that mark."""
    lines = LINES if program is PROGRAM else program.read_text().splitlines()
    return [n for n, line in enumerate(lines, 1) if line.endswith(f"# {mark}: {kind}")]


def names_everything(text: str, kind: str, program: Path = PROGRAM) -> None:
    """The error of rank 0 names rank 1, what rank 0 called, and the lines of both."""
    file = program.name
    said = re.search(rf"<<{kind} 0 (\w+) (.*?)>>", text, re.DOTALL)
    assert said, (kind, text)
    assert "rank 1" in said[2], (kind, said[2])
    (here,) = lines_of("here", kind, program)
    assert f"{file}:{here} in {kind}" in said[2], (kind, said[2])
    if kind.startswith("other"):
        assert re.search(r"collective #\d+", said[2]), said[2]
        (hung,) = lines_of("hung", kind, program)
        assert f"{file}:{hung} in {kind}" in said[2], said[2]
    if kind.startswith("late") or kind in ("no_send", "no_receive", "crossed"):
        assert "tag" in said[2] or re.search(r"collective #\d+", said[2]), said[2]
        assert any(f"{file}:{line} in" in text or f'{file}", line {line} in' in text
                   for line in lines_of("hung", kind, program)), (kind, text)  # fmt: skip


#: Programs for stock torch, and for NCCL: in short some kinds, in one job.
OTHERS = {
    "bridge": ("late_gathered", "late_asynchronous", "no_send", "other_operation", "other_root"),
    "nccl": ("late_all_reduce", "other_size", "other_root"),
}


def every_kind(program: Path) -> tuple[str, ...]:
    """All kinds of a program, in its order."""
    return tuple(re.findall(r"^def (\w+)\(rank: int", program.read_text(), re.MULTILINE))


@deadline(150, long=300)
@pytest.mark.parametrize("over", OTHERS)
def test_a_hang_over_something_else_is_explained(over, count):
    program = PROGRAM.with_name(f"hangs_{over}.py")
    kinds = every_kind(program) if LONG else OTHERS[over]
    ended = run_job(2, str(program), *kinds, limit=140)
    assert ended.code == 0, ended.text
    for kind in kinds:
        names_everything(ended.text, kind, program)
        count(1)


@pytest.mark.parametrize("stopped", (0, 1))
def test_a_call_of_a_rank_that_has_left_is_explained(stopped):
    program = PROGRAM.with_name("leaves_nccl.py")
    ended = run_job(2, str(program), str(stopped), limit=60)
    assert ended.code == 0, ended.text
    (line,) = (n for n, text in enumerate(program.read_text().splitlines(), 1)
               if text.endswith("# called by: leaving"))  # fmt: skip
    said = re.search(rf"<<other_root {stopped} (\w+) (.*?)>>", ended.text, re.DOTALL)
    assert said and f"rank {1 - stopped} called as collective #2" in said[2], ended.text
    assert f"{program.name}:{line} in other_root" in said[2], ended.text
    assert "shm hpcdist." in ended.text and not ended.shm, ended


def all_jobs() -> list[tuple[str, ...]]:
    """Every kind, each job with one that hangs first."""
    every = every_kind(PROGRAM)
    quick = [kind for kind in every if kind.startswith(("other", "refused"))]
    hangs = [kind for kind in every if kind not in quick]
    return [(kind, *quick[i : i + 1]) for i, kind in enumerate(hangs)]


@pytest.mark.parametrize("kinds", all_jobs() if LONG else JOBS, ids=lambda kinds: kinds[0])
def test_a_hang_is_explained(kinds, count):
    ended = run_job(2, str(PROGRAM), *kinds)
    assert ended.code == 0, ended.text
    report = re.search(r"hang report of the 2 ranks.*?end of the report", ended.text, re.DOTALL)
    assert report, ended.text
    # by name, where Python is, and what the rank called before
    assert "rank 0" in report[0] and "rank 1" in report[0] and "File " in report[0]
    assert report[0].count("Threads, as the kernel sees them") == 2, report[0]
    for kind in kinds:
        names_everything(ended.text, kind)
        count(1)


def test_a_signal_asks_for_a_report_with_native_stacks():
    job = start(SLEEPER.format(seconds=4))
    try:
        pids = pids_of(job)
        wait_till_hung(pids)
        time.sleep(0.2)  # to where the program sleeps
        os.kill(pids[1], signal.SIGUSR2)
        text, _ = job.communicate(timeout=60)
    finally:
        job.kill()
    assert job.returncode == 0, text
    assert "hang report of the 2 ranks" in text and "a signal asks for it" in text, text
    assert "is in barrier #2 of group 'world'" in text, text
    assert "last one: all_reduce #1 of group 'world', 3 elements of float64" in text, text
    assert text.count("Main thread, native:") == 2 and "libc.so.6(clock_nanosleep" in text, text


def test_the_programs_own_handler_stays():
    program = "import signal\nsignal.signal(signal.SIGUSR2, lambda *_: print('mine', flush=True))\n"
    job = start(program + SLEEPER.format(seconds=2))
    try:
        os.kill(pids_of(job)[1], signal.SIGUSR2)
        text, _ = job.communicate(timeout=60)
    finally:
        job.kill()
    assert job.returncode == 0 and "mine" in text and "hang report" not in text, text


def test_a_program_may_lie_in_a_folder_named_hpcdist(tmp_path):
    program = tmp_path / "hpcdist" / "train.py"
    program.parent.mkdir()
    # The ranks start at different times, and rank 1 is late until rank 0 has given up.
    program.write_text("""
import hpcdist, os, sys
from datetime import timedelta
hpcdist.init_process_group()
if hpcdist.get_rank() == 1:
    open(sys.argv[1]).read()
try:
    hpcdist.barrier(timeout=timedelta(seconds=1.2))
except hpcdist.DistError as error:
    print(error, flush=True)
if hpcdist.get_rank() == 0:
    open(sys.argv[1], "w").close()
""")
    fifo = tmp_path / "given up"
    os.mkfifo(fifo)
    ended = run_job(2, str(program), str(fifo))
    assert ended.code == 0, ended.text
    assert re.search(r"rank 1: .*, now at hpcdist/train.py:6 in <module>", ended.text), ended.text


def test_without_the_report():
    ended = run_job(2, str(PROGRAM), "late_barrier", env={"HPCDIST_HANG_REPORT": "0"})
    assert ended.code == 0 and "hang report" not in ended.text, ended.text
    assert "DistTimeoutError" in ended.text


def test_a_killed_rank_leaves_its_recorder():
    job = start(SLEEPER.format(seconds=30))
    try:
        pids = pids_of(job)
        wait_till_hung(pids)
        os.kill(pids[1], signal.SIGKILL)
        text, _ = job.communicate(timeout=60)
    finally:
        job.kill()
    assert job.returncode != 0, text
    left = [path for path in find(folder_of_user())
            if path.name.endswith(tuple(f"-p{pid}" for pid in pids.values()))]  # fmt: skip
    try:
        dead = next(one for one in map(read, left) if one.rank == 1)
        assert not dead.alive and not dead.left
        assert [one.name for one in dead.operations][-1] == "all_reduce"
        other = next(one for one in map(read, left) if one.rank == 0)
        assert str(other.operations[-1]).startswith("barrier #2 of group 'world', at")
        assert other.operations[-1].state in ("running", "failed")  # as the launcher kills it
    finally:
        for path in left:
            path.unlink()


DUMPING = """
import sys, numpy as np, hpcdist as d
from datetime import timedelta
d.init_process_group()
d.group.WORLD.timeout = timedelta(seconds=1)
for _ in range(5):
    d.all_reduce(np.ones(3))
try:
    d.all_reduce(np.ones(2 + d.get_rank()))
except d.DistMismatchError:
    print("mismatch", flush=True)
"""


def test_a_failure_writes_copies(tmp_path):
    folder = tmp_path / "dumps"
    job = start(DUMPING, {"HPCDIST_DUMP": str(folder)})
    text, _ = job.communicate(timeout=60)
    assert job.returncode == 0 and text.count("mismatch") == 2, text
    files = find(folder)
    assert len(files) == 2 == len(list(folder.iterdir())), files
    for one in map(read, files):
        assert [each.state for each in one.operations[-6:]] == ["done"] * 5 + ["failed"]


def test_leftovers_are_removed_when_they_are_old(tmp_path):
    folder = folder_of_user()
    folder.mkdir(mode=0o700, exist_ok=True)
    old, new, strange = (folder / name for name in ("00000001-r0-p1", "00000002-r0-p1", "other"))
    for path in (old, new, strange):
        path.write_bytes(b"hpcdrec\n" + bytes(4000))
    os.utime(old, (1_000_000_000, 1_000_000_000))
    try:
        job = start(SLEEPER.format(seconds=0))
        text, _ = job.communicate(timeout=60)
        assert job.returncode == 0, text
        assert not old.exists() and new.exists() and strange.exists()
    finally:
        for path in (new, strange):
            path.unlink()


WITHOUT = """
import os, numpy as np, hpcdist as d
from hpcdist import _engine
d.init_process_group()
for _ in range(5):
    d.all_reduce(np.ones(3))
written = _engine.dump_recorder("/tmp/never")
os.write(1, f"path {_engine.recorder_path()!r} {written}\\n".encode())
"""


NAMED = """
import numpy as np, hpcdist as d
from datetime import timedelta
from hpcdist import _engine
from hpcdist.recordings import read
d.init_process_group(timeout=timedelta(seconds=30))
try:
    d.all_reduce(np.ones(2 + d.get_rank()))
except d.DistMismatchError as error:
    said = str(error)
(site,) = {one.site.file for one in read(_engine.recorder_path()).operations if one.site}
print(f"<<{said}>> <{site}>", flush=True)
"""


def test_a_file_name_does_not_command_the_terminal(tmp_path):
    program = tmp_path / "<b>\x1b]0;pwn\x07\nnext\ttab.py"
    program.write_text(NAMED)
    ended = run_job(2, str(program), limit=60)
    assert ended.code == 0, ended.text
    shown = r"<b>\x1b]0;pwn\x07\nnext\ttab.py"
    assert ended.text.count(f"{shown}:") >= 2 and ended.text.count(f"{shown}>") == 2, ended.text
    assert "\x1b" not in ended.text and "\x07" not in ended.text, ended.text


def test_it_can_be_switched_off():
    job = start(WITHOUT, {"HPCDIST_RECORDER": "0"})
    text, _ = job.communicate(timeout=60)
    assert job.returncode == 0 and text.count("path '' False") == 2, text


FORKED = """
import os, numpy as np, hpcdist as d
from hpcdist import _engine
from hpcdist.recordings import read
d.init_process_group()
d.all_reduce(np.ones(3))
path = _engine.recorder_path()
before = read(path).operations
child = os.fork()
if child == 0:
    try:
        d.all_reduce(np.ones(3))
    except d.DistError:
        os._exit(0 if _engine.recorder_path() == "" else 2)
    os._exit(1)
assert os.waitpid(child, 0)[1] == 0
assert read(path).operations == before and os.path.exists(path)
d.barrier()
"""


def test_a_forked_child_leaves_its_parents_alone():
    job = start(FORKED)
    text, _ = job.communicate(timeout=60)
    assert job.returncode == 0, text
