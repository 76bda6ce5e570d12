"""HPCDIST_TAKE_OVER: programs that do not know hpcdist run on it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import plain_environment, run_job
from mpis import OPEN_MPI
from ports import free_port

pytestmark = [pytest.mark.jobs, pytest.mark.rare]

PROGRAM = str(Path(__file__).with_name("taking_over.py"))
TAKE_OVER = {"HPCDIST_TAKE_OVER": "gloo,mpi"}


def alone(*command: str, **more: str) -> tuple[int, str]:
    """Run a plain Python process, without a launcher's variables."""
    done = subprocess.run(
        [sys.executable, *command],
        env=plain_environment(GLOO_SOCKET_IFNAME="lo", **more),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=100,
    )
    return done.returncode, done.stdout


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("gloo", "cpu:hpcdist,cuda:hpcdist"),
        ("mpi", "cpu:hpcdist,cuda:hpcdist"),
        ("cpu:gloo,cuda:nccl", "cpu:hpcdist,cuda:nccl"),
        ("", "cpu:hpcdist"),
    ],
)
def test_a_program_that_does_not_know_hpcdist(name: str, config: str) -> None:
    ended = run_job(2, PROGRAM, "backend", name, env=TAKE_OVER)
    assert ended.code == 0, ended.text
    for rank in "01":
        assert f"place {rank} 2 {rank}" in ended.text
        assert f"rank {rank} says {name or 'undefined'} {config}" in ended.text, ended.text
    assert ended.text.count("was asked for, and HPCDIST_TAKE_OVER=gloo,mpi lets") == 1


@pytest.mark.any_mpi
def test_nothing_changes_without_the_variable() -> None:
    code, text = alone(PROGRAM, "answers")
    assert text == "mpi False cpu gloo device gloo\n" and code == 0
    code, text = alone(PROGRAM, "untouched", HPCDIST_TAKE_OVER="")
    assert text == "place - - -\n" and code == 0
    ended = run_job(2, PROGRAM, "backend", "gloo")
    assert ended.code != 0 and "environment variable RANK expected" in ended.text


@pytest.mark.any_mpi
def test_what_torch_answers() -> None:
    for taken, answer in (
        ("gloo,mpi", "mpi True cpu hpcdist device hpcdist\n"),
        ("gloo", "mpi False cpu hpcdist device hpcdist\n"),
        (" MPI ", "mpi True cpu gloo device gloo\n"),
    ):
        assert alone(PROGRAM, "answers", HPCDIST_TAKE_OVER=taken) == (0, answer)


@pytest.mark.any_mpi
def test_a_wrong_name_and_a_torch_without_the_private_names_are_errors() -> None:
    code, text = alone(PROGRAM, "answers", HPCDIST_TAKE_OVER="gloo,ucc")
    assert code != 0 and "hpcdist cannot take over 'ucc', only gloo and mpi" in text
    code, text = alone(PROGRAM, "answers", HPCDIST_TAKE_OVER=" , ")
    assert code != 0 and "HPCDIST_TAKE_OVER=' , ' names no backend" in text
    lacking = (
        "import torch, torch.distributed as d; from hpcdist_torch_plugin import take_over as t;"
        "del d.distributed_c10d._new_process_group_helper; t.install(('gloo',))"
    )
    code, text = alone("-c", lacking)
    last = text.splitlines()[-1]
    assert last.startswith("RuntimeError: HPCDIST_TAKE_OVER needs names of torch.distributed that")
    assert "has not: _new_process_group_helper. Unset it and start the group by hpcdist" in last


@pytest.mark.parametrize("name", ["mesh", "turned", "timeouts", "remote"])
def test_what_meets_by_itself(name: str) -> None:
    ended = run_job(2, PROGRAM, name, env=TAKE_OVER)
    assert ended.code == 0, ended.text
    assert ended.text.count(f"{'rpc' if name == 'remote' else name} is done") == 2, ended.text


def test_a_rank_that_mpi_contradicts_is_an_error_on_all() -> None:
    ended = run_job(2, PROGRAM, "wrong_rank", env=TAKE_OVER)
    assert ended.code != 0
    assert "told rank=0, world_size=2, but this is rank 1 of 2" in ended.text, ended.text


def test_mpi_as_the_init_method_alone() -> None:
    """Without a backend torch takes gloo."""
    for env, config, notices in (({}, "cpu:gloo", 1), (TAKE_OVER, "cpu:hpcdist", 0)):
        ended = run_job(2, PROGRAM, "no_backend", env=env)
        # a thread of torch's own gloo that drops a tensor while Python ends aborts the process
        assert ended.code == 0 or "terminate called" in ended.text, ended.text
        assert ended.text.count(f"backend {config}\n") == 2, ended.text
        assert ended.text.count("no backend was named") == notices, ended.text


def test_torchrun_and_children() -> None:
    """MPICH makes one job of processes that were started otherwise; Open MPI says what to do."""
    port = str(free_port())
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "2", PROGRAM, "backend")
    for command in ((*torchrun, "gloo"), (*torchrun, "mpi"), (PROGRAM, "children", port)):
        code, text = alone(*command, **TAKE_OVER)
        if OPEN_MPI:
            assert code != 0 and re.search(r"Start them with:\n +\S*mpirun .*-n 2 ", text), text
        else:
            assert code == 0 and len(re.findall(r"^(child|rank) \d (is|says)", text, re.M)) == 2, (
                text
            )


def test_one_process_without_a_launcher() -> None:
    """torch built with MPI starts such a world of one, too."""
    program = (
        f"import sys; sys.path.insert(0, {os.path.dirname(PROGRAM)!r}); import taking_over as t;"
    )
    code, text = alone(
        "-c", f"{program} t.dist.init_process_group('mpi'); t.work(); t.say('well')", **TAKE_OVER
    )
    assert code == 0 and text.endswith("well\n"), text
