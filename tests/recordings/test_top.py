"""``python -m hpcdist top``: what each rank of a running job is in, from another shell."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import made_recordings as made
import pytest
from jobs import run_job
from patience import wait_for
from recorded_jobs import SLEEPER, pids_of, start, wait_till_hung
from ulfm import only_ulfm

from hpcdist import cli
from hpcdist.cli import top as command
from hpcdist.cli.top import remote_commands
from hpcdist.recordings import find, folder_of_user
from hpcdist.recordings.analysis.match import divergences
from hpcdist.recordings.hangs import hangs
from hpcdist.recordings.model import Recording, Survival
from hpcdist.recordings.rows import current, merged, readable, row_of, rows_of, survival

pytestmark = pytest.mark.jobs
SURVIVORS = str(Path(__file__).with_name("survivors.py"))


@pytest.fixture(scope="module")
def began() -> float:
    """When no job had started yet."""
    return time.monotonic()


@pytest.fixture(scope="module")
def hung(began):
    """A job whose rank 1 sleeps while rank 0 waits in a barrier: the pids of its ranks."""
    with hung_job(SLEEPER) as pids:
        yield pids


@contextmanager
def hung_job(program: str) -> Iterator[dict[int, int]]:
    job = start(program.format(seconds=600))
    pids: dict[int, int] = {}
    try:
        pids = pids_of(job)
        wait_till_hung(pids)
        yield pids
    finally:
        for pid in pids.values():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        job.communicate(timeout=60)


def top(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hpcdist", "top", *arguments],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def test_names_do_not_command_the_terminal(monkeypatch, capsys):
    named = "train\x1b]0;pwn\x07.py"
    row = {
        "job": "0a0b0c0d", "program": named, "size": 1, "rank": 0, "host": named, "pid": 1,
        "alive": False, "operation": named, "state": named, "others": [named], "stacks": named,
        "waits": False, "spares": 0, "recoveries": 0,
    }  # fmt: skip
    options = argparse.Namespace(encoded=False, json=False, once=True, stacks=True)
    monkeypatch.setattr(command, "_everywhere", lambda _: [row])
    assert command.run(options) == 0
    shown = capsys.readouterr().out
    assert "\x1b" not in shown and "\x07" not in shown
    assert shown.count("train\\x1b]0;pwn\\x07.py") == 6

    def fails(_):
        raise ValueError(named)

    monkeypatch.setattr(command, "_everywhere", fails)
    assert command.run(options) == 1
    assert "train\\x1b]0;pwn\\x07.py" in capsys.readouterr().err


def test_a_hung_job(began, hung):
    shown = top(str(hung[0]), "--once")
    assert shown.returncode == 0, shown.stderr
    head, zero, one = shown.stdout.splitlines()
    digits = head.split()[1].rstrip(",")
    assert len(digits) == 8 and "2 of 2 ranks" in head
    assert str(hung[0]) in zero and "is in barrier #2 of group 'world', at <string>:" in zero
    assert str(hung[1]) in one and "is outside hpcdist for" in one
    assert "last: all_reduce #1 of group 'world', float64[3], SUM, at <string>:4 in <module>" in one
    rows = json.loads(top(digits, "--json").stdout)
    assert [row["rank"] for row in rows] == [0, 1] and rows[0]["inside"] and not rows[1]["inside"]
    assert 0 < rows[0]["seconds"] < time.monotonic() - began


def test_a_rank_that_misses_the_first_collective():
    """The collectives of init_process_group do not count as the program's first ones."""
    with hung_job(SLEEPER.replace("d.all_reduce(np.ones(3))", "")) as pids:
        rows = rows_of(str(pids[0]), stacks=False)
        found = readable(find(folder_of_user()), None)  # those of other jobs come and go
    (one,) = hangs(rows, least=0.0)
    assert (one["group"], one["number"], one["missing"]) == ("world", 1, [1])
    (apart,) = divergences([one for one in found if one.job == rows[0]["job"]])
    assert (apart.kind, apart.collective.seq, apart.collective.absent) == ("absent", 1, [1])


def test_stacks_of_a_hung_job(hung):
    shown = top(str(hung[1]), "--stacks").stdout
    assert shown.count("Main thread, native:") == 2, shown
    assert 'File "<string>", line 7 in <module>' in shown, shown  # where rank 1 sleeps
    assert shown.count("Threads, as the kernel sees them:") == 2


def test_a_stopped_rank_is_shown_as_such(hung):
    os.kill(hung[1], signal.SIGSTOP)
    try:
        # it cannot answer, and is not waited for for long
        wait_for(lambda: "no sign of life for" in top(str(hung[0]), "--stacks").stdout)
    finally:
        os.kill(hung[1], signal.SIGCONT)
    wait_for(lambda: "no sign of life for" not in top(str(hung[0]), "--once").stdout)


def test_other_nodes_through_a_command(hung, tmp_path):
    """The stand-in for ssh runs the command here, and writes down for which host."""
    log = tmp_path / "log"
    ssh = tmp_path / "ssh"
    ssh.write_text(f'#!/bin/sh\necho "$1" >> {log}\n[ "$1" = down ] && exit 255\nexec sh -c "$2"\n')
    ssh.chmod(0o755)
    shown = top(str(hung[0]), "--once", "--hosts", "node1,down", "--ssh", str(ssh))
    assert shown.returncode == 0, shown.stderr
    assert "2 of 2 ranks" in shown.stdout and "hpcdist top: down: no answer" in shown.stderr
    assert sorted(log.read_text().split()) == ["down", "node1"]


def test_nodes_that_are_silent_and_connections_that_stay(tmp_path, monkeypatch, capsys):
    """All nodes have the same time; ssh may leave a process behind that keeps its output open."""
    ssh = tmp_path / "ssh"
    ssh.write_text(
        '#!/bin/sh\n[ "$1" = silent ] && exec sleep 60\n'
        f"sleep 60 & echo $! > {tmp_path}/left; echo said by $1 >&2\n"
    )
    ssh.chmod(0o755)
    monkeypatch.setattr(command, "_PATIENCE", 2.0)
    began = time.monotonic()
    hosts = ",".join(["there", *4 * ["silent"]])
    assert cli.main(["top", "99999999", "--once", "--hosts", hosts, "--ssh", str(ssh)]) == 1
    assert time.monotonic() - began < 6.0
    told = capsys.readouterr().err
    assert "there: said by there" in told and told.count("silent: no answer") == 4
    os.kill(int((tmp_path / "left").read_text()), signal.SIGTERM)


def test_no_such_job():
    shown = top("99999999")
    assert shown.returncode == 1 and "no rank of job 99999999" in shown.stderr


def test_what_is_started_elsewhere():
    options = argparse.Namespace(job="77", hosts="a,b", ssh="ssh -q", stacks=True, json=False)
    first, second = remote_commands(options)
    assert first[:3] == ["ssh", "-q", "a"] and second[2] == "b"
    assert first[3].endswith("-m hpcdist top 77 --json --elsewhere --stacks")


def test_ctrl_c_in_the_middle_of_a_look(monkeypatch, capsys):
    def interrupted(options):
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "_everywhere", interrupted)
    assert cli.main(["top"]) == 0
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("as_json", [False, True])
def test_all_nodes_of_a_slurm_job_are_asked(as_json, monkeypatch):
    """With --json it showed this node's ranks alone."""
    monkeypatch.setattr(command.shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(command, "_nodes_of_slurm_job", lambda job: 3)
    options = argparse.Namespace(job="77", hosts="", stacks=False, json=as_json, elsewhere=False)
    (asked,) = remote_commands(options)
    assert asked[:4] == ["srun", "--jobid=77", "--overlap", "--nodes=3"]
    options.elsewhere = True  # what it starts there asks no others
    assert not remote_commands(options)


def rows(job, *ranks, **more):
    fixed = {
        "size": 2, "program": f"{job}.py", "host": "h", "pid": 1, "alive": True, "recoveries": 0,
    }  # fmt: skip
    return [{"job": job, "rank": rank, **fixed, **more} for rank in ranks]


def test_two_jobs_are_not_shown_as_one(monkeypatch, capsys):
    """Neither where a host has another job than this node, nor where two hosts have one each."""
    here: list[dict] = []
    asked, answers = [], {}

    def rows_here(job, stacks, pids):
        if not here:
            raise ValueError("no rank is here")
        return here

    def popen(command, **_):
        asked.append(command)
        return command[1]

    monkeypatch.setattr(command, "rows_of", rows_here)
    monkeypatch.setattr(command.subprocess, "Popen", popen)
    monkeypatch.setattr(command, "_answer", lambda _, host, *__: answers[host])
    options = argparse.Namespace(
        job=None, hosts="a,b", ssh="ssh", stacks=False, json=True, encoded=False, once=True,
        elsewhere=False,
    )  # fmt: skip

    answers.update(a=rows("0a0b0c0d", 0), b=rows("11111111", 1))
    assert command.run(options) == 1
    assert "several jobs fit" in (told := capsys.readouterr().err)
    assert "0a0b0c0d: 2 ranks, 0a0b0c0d.py" in told and "11111111: 2 ranks" in told

    here[:] = rows("22222222", 0)
    answers.update(a=rows("22222222", 1), b=[])
    asked.clear()
    options.job = "4321"  # a pid of this node
    assert command.run(options) == 0
    assert [row["rank"] for row in json.loads(capsys.readouterr().out)] == [0, 1]
    assert all("top 22222222 --json --elsewhere" in each[2] for each in asked), asked


@only_ulfm
def test_spares_and_a_death():
    env = {"HPCDIST_FT": "1", "HPCDIST_SPARES": "2"}
    ended = run_job(4, SURVIVORS, env=env, ft=True, limit=80)
    before, after = (
        [line for line in ended.text.splitlines() if line.startswith(f"{when}: ")]
        for when in ("before", "after")
    )
    assert "2 of 2 ranks, 2 spares: " in before[0], ended.text
    assert [line.split()[1] for line in before[1:]] == ["rank", "rank", "spare", "spare"]
    assert all("  waits for a death" in line for line in before[3:])
    assert "2 of 2 ranks, 1 spare: " in after[0], ended.text
    told = r"after: \(1 process has died; 1 recovery of [0-9.]+ s in all, the last \d+ s ago\)"
    assert re.fullmatch(told, after[1]), after
    assert [line.split()[1:3] for line in after[2:]] == [
        ["rank", "0"],
        ["rank", "1"],
        ["spare", "0"],
    ]
    pids = [[line.split()[4] for line in lines] for lines in (before[1:], after[2:])]
    assert pids[1] == [pids[0][0], *pids[0][2:]], "the first spare is rank 1 now"
    assert before[0].split()[2] == after[0].split()[2], "the job keeps its digits"


def recording(rank: int, alive: bool, *known: int) -> Recording:
    made = Recording("", rank, 3, rank, "h", "0a0b0c0d", "", "train.py", 0, False, alive)
    made.survival = Survival(*known)
    return made


def test_what_a_job_has_survived():
    second = 1_000_000_000
    ranks = [
        recording(0, True, 0, 0, 3, 2, second // 4, 5 * second),
        recording(1, True, 0, 0, 3, 2, second // 8, 5 * second),  # a spare in the first recovery
        recording(1, False, 0, 1, 1, 1, 0, 3 * second),  # has died between the two
        recording(2, False, 0, 0, 3, 2, second // 4, 5 * second),  # since
    ]
    left = current(ranks)
    assert left == [ranks[0], ranks[1], ranks[3]]
    seen = merged(row_of(one, 8 * second) for one in ranks)  # each on a node of its own
    assert [row["pid"] for row in seen] == [0, 1, 2] and seen[1]["alive"]
    said = survival(seen)
    assert said == "3 processes have died; 2 recoveries of 0.250 s in all, the last 3 s ago"
    assert survival([row_of(recording(0, True), second)]) == "" == survival([])


def test_a_pid_counts_on_its_own_node_only(hung):
    assert "2 of 2 ranks" in top(str(hung[0]), "--once").stdout
    shown = top(str(hung[0]), "--once", "--elsewhere")
    assert shown.returncode == 1 and "no rank of job" in shown.stderr


@pytest.mark.parametrize("interval", ["inf", "nan", "-1", "1e9", "soon"])
def test_intervals_that_are_none(interval):
    shown = top(f"--interval={interval}")
    assert shown.returncode == 2 and "argument --interval" in shown.stderr, shown.stderr
    assert "Traceback" not in shown.stderr


def test_a_squeue_that_hangs(monkeypatch, tmp_path, capsys):
    for name, text in (("srun", "exit 1"), ("squeue", "exec sleep 20")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(command, "_PATIENCE", 0.3)
    options = argparse.Namespace(
        job="99999999", hosts="", ssh="ssh", stacks=False, json=False, encoded=False, once=True,
        elsewhere=False,
    )  # fmt: skip
    assert command.run(options) == 1
    assert "squeue did not say within" in capsys.readouterr().err


def test_a_former_spare_does_not_go_on_with_a_dead_ranks_numbers():
    """It showed less than 0 calls since the last look."""
    before, after = (
        row_of(made.recording(1, 2, lambda group, n=n: [made.operation(group, n, 1)]), made.BEGIN)
        for n in (20, 25)
    )
    assert " 5 calls" in list(command._lines([after], [before], False))[-1]
    spare = {**before, "pid": 9, "operations": 3}
    assert "calls" not in list(command._lines([spare], [before], False))[-1]
