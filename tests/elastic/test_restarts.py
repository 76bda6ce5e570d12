"""Jobs that are killed and started again end with what an undisturbed run has, bit for bit."""

from __future__ import annotations

import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import jobs
import pytest
from jobs import plain_environment, run_job
from kill_jobs import END
from kill_jobs import PROGRAM as TRAINING
from long_form import deadline, size
from mpis import OPEN_MPI
from patience import patience
from ulfm import only_ulfm

from hpcdist.recordings.read import folder_of_user

pytestmark = [pytest.mark.jobs, pytest.mark.rare]

PROGRAM = str(Path(__file__).with_name("restarts.py"))
LAUNCH = [sys.executable, "-m", "hpcdist", "launch", "--no-label", "--no-bind"]
STEPS = 8
#: A restart, its reason, and the ranks; mpirun may have left a line unfinished before it.
RESTART = re.compile(r"hpcdist launch: restart (\d) of \d: the job .*; now (\d) rank")


def run(*command: str, limit: float = 100, **more: str) -> tuple[int, str]:
    """Run a command that leaves no commit behind."""
    limit = max(min(limit * patience(), jobs.until - jobs.SPARE - time.monotonic()), 1.0)
    job = subprocess.Popen(
        command, env=plain_environment(**more), text=True, errors="replace",
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        text = job.communicate(timeout=limit)[0]
    except subprocess.TimeoutExpired:
        job.send_signal(signal.SIGTERM)
        text = job.communicate(timeout=30)[0]
        raise AssertionError(f"the job did not end within {limit:g} s:\n{text}") from None
    assert not commits_of(job.pid), text
    return job.returncode, text


def commits_of(pid: int) -> list[Path]:
    """The folders of the job that a process starts again; other tests may run beside this one."""
    folder = folder_of_user()
    return [*folder.glob(f"commits-{pid}-*"), *folder.glob(f"commits-torchrun-{pid}-*")]


def undisturbed(sizes: str) -> list[str]:
    ended = run_job(3, TRAINING, "reference", str(len(sizes)), f"adam:{sizes}")
    return list(END.search(ended.text).groups()[2:])


@pytest.mark.slow
@deadline(240, long=3600)
def test_killed_jobs_go_on_where_they_were(tmp_path, count):
    """A death in the middle of a commit, which a spare slot makes up for; then one beside a damaged
    commit, so that the one before is taken, by fewer ranks."""
    rng = random.Random()
    for case in range(size(1, 10)):
        folder = tmp_path / str(case)
        folder.mkdir()
        first, second = rng.randrange(1, 4), rng.randrange(5, 8)
        victims = [f"{rng.randrange(3)}=write{first}", f"{rng.randrange(3)}=damage{second}"]
        if victims[0][0] == victims[1][0]:
            victims[1] = f"{(int(victims[1][0]) + 1) % 3}{victims[1][1:]}"
        code, text = run(
            *LAUNCH, "-n", "3", "--max-restarts", "3", "--standby", "1",
            PROGRAM, "zero", str(STEPS), str(folder), *victims,
        )  # fmt: skip
        assert code == 0 and RESTART.findall(text) == [("1", "3"), ("2", "2")], text
        found = END.search(text)
        sizes = "3" * (second - 1) + "2" * (STEPS - second + 1)
        assert found and found[2] == sizes and f"began {second - 1} " in text, text
        assert f"the commit of step {second} of rank {victims[1][0]}" in text, text
        assert list(found.groups()[2:]) == undisturbed(sizes), text
        count(1)


FOLDS = """
import os, pathlib, signal, sys
import torch
import hpcdist as dist
from hpcdist.elastic import State, elastic
dist.init_process_group()
died = pathlib.Path(sys.argv[1])
for fold in (1, 2, 3):
    total = torch.zeros(1, dtype=torch.float64)
    state = State(total=total)
    for step in elastic(state, 4):
        with step:
            if (fold, step.index, dist.get_rank()) == (2, 2, 1) and not died.exists():
                died.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            each = torch.tensor([float(fold * 10 + step.index)], dtype=torch.float64)
            dist.all_reduce(each)
            total += each
    if dist.get_rank() == 0:
        print(f"fold {fold} began {state.began} total {total.item():g}", flush=True)
"""


def test_each_state_of_a_program_goes_on_from_its_own_commit(tmp_path):
    """Three folds; a rank dies in the second, and the first one is not trained again."""
    program = tmp_path / "folds.py"
    program.write_text(FOLDS)
    code, text = run(
        *LAUNCH, "-n", "2", "--max-restarts", "1", "--standby", "1",
        str(program), str(tmp_path / "died"),
    )  # fmt: skip
    assert code == 0 and RESTART.findall(text) == [("1", "2")], text
    ends = re.findall(r"fold (\d) began (\d) total (\d+)", text)
    assert ends == [
        ("1", "0", "92"), ("1", "4", "92"), ("2", "2", "172"), ("3", "0", "252"),
    ], text  # fmt: skip


@pytest.mark.skipif(OPEN_MPI, reason="Open MPI needs its launcher: tested above")
def test_restarts_of_torchrun(tmp_path):
    code, text = run(
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2",
        "--max-restarts", "1", PROGRAM, "zero", "6", str(tmp_path), "1=begin4",
    )  # fmt: skip
    found = END.search(text)
    assert code == 0 and found and "began 4 " in text, text
    assert list(found.groups()[2:]) == undisturbed("222222"), text


@only_ulfm
def test_with_ulfm_the_launch_knows_how_the_job_ended(tmp_path):
    """mpirun's status is 0 always there: one rank that dies is survived, an error of all is not."""
    code, text = run(
        *LAUNCH, "-n", "2", "--max-restarts", "1", PROGRAM, "sgd", "6", str(tmp_path), "1=begin2",
        HPCDIST_FT="1",
    )  # fmt: skip
    assert code == 0 and not RESTART.search(text) and "sizes 221111 " in text, text
    failing = tmp_path / "fails.py"
    failing.write_text("import hpcdist as dist; dist.init_process_group(); raise OSError('no')")
    code, text = run(*LAUNCH, "-n", "2", "--max-restarts", "1", str(failing), HPCDIST_FT="1")
    assert code == 1 and RESTART.findall(text) == [("1", "2")], text


def test_ctrl_c_wrong_arguments_and_failures_at_once(tmp_path):
    program = tmp_path / "ends.py"
    program.write_text(
        "import sys, time\nimport hpcdist as dist\n"
        "if sys.argv[1] != 'sleeps':\n    sys.exit(int(sys.argv[1]))\n"
        "dist.init_process_group()\nprint('sleeps', flush=True)\ntime.sleep(100)\n"
    )
    code, text = run(*LAUNCH, "-n", "1", "--max-restarts", "9", str(program), "2")
    assert code == 2 and not RESTART.search(text), text
    code, text = run(*LAUNCH, "-n", "1", "--max-restarts", "9", str(program), "3")
    assert code == 3 and len(RESTART.findall(text)) == 2, text
    assert "3 times in a row at once" in text, text
    job = subprocess.Popen(
        [*LAUNCH, "-n", "2", "--max-restarts", "9", str(program), "sleeps"], text=True,
        env=plain_environment(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    printed = ""
    while printed.count("sleeps\n") < 2:  # the deadline bounds it
        printed += job.stdout.readline()
    job.send_signal(signal.SIGINT)
    text = job.communicate(timeout=60)[0]
    assert job.returncode not in (0, None) and not RESTART.search(text), text
    assert not commits_of(job.pid)
