"""NCCL without MPI: processes that meet over a store, as torchrun starts them; and their deaths."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jobs
import long_form
import nccl_faults
import pytest
import standin
from ports import free_port

pytestmark = [pytest.mark.jobs, pytest.mark.rare, pytest.mark.any_mpi]

PROGRAM = str(Path(__file__).with_name("nccl_ranks.py"))


def run(size: int, *case: str) -> list[tuple[int, str]]:
    """Exit status and output of each rank."""
    standin.build()
    port = free_port()
    env = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(size),
        "OMP_NUM_THREADS": "1",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, PROGRAM, *case],
            env=env | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        return [(job.wait(), text) for job in ranks for text in [job.communicate(timeout=90)[0]]]
    finally:
        for job in ranks:
            job.kill()


def results(text: str) -> list[list]:
    """What a rank says of its cases: kind, mode, checked, seconds late, problem."""
    return [json.loads(line) for line in re.findall(r"^@(.*)$", text, re.M)]


@pytest.mark.parametrize("size", long_form.size([1, 3], [1, 2, 3, 4]))
def test_processes_that_meet_over_a_store(size, count):
    ranks = run(size, "faults")
    for rank, (code, text) in enumerate(ranks):
        problems = [case[-1] for case in results(text) if case[-1]]
        assert code == 0 and f"rank {rank}: fine" in text and not problems, (problems, text)
    cases = [results(text) for _, text in ranks]
    assert len(cases[0]) >= 12
    count(len(cases[0]), max(case[-2] for rank in cases for case in rank))


@pytest.mark.parametrize(
    "size, first", long_form.size([(4, 0)], [(n, i) for n in (2, 3, 4) for i in range(4)])
)
def test_ranks_die_one_after_the_other(size, first, count):
    ranks = run(size, "die", str(first))
    late = []
    for rank, (code, text) in enumerate(ranks):
        # rank 0 sees all others die, the last one nobody
        cases = results(text)
        assert code == (0 if rank == 0 else -9), text
        assert len(cases) == size - 1 - max(0, rank - 1) - (rank > 0), text
        assert not any(case[-1] for case in cases), text
        late += [case[-2] for case in cases]
    count(size - 1, max(late))


def test_a_forked_child_does_not_touch_nccl():
    for rank, (code, text) in enumerate(run(2, "forked")):
        assert code == 0 and "child: told" in text and f"rank {rank}: fine" in text, text


def test_mpirun_ends_a_job_of_which_a_rank_died(count):
    done = jobs.run_job(2, PROGRAM, "killed")
    assert done.code != 0 and not done.orphans, done
    assert done.seconds < nccl_faults.LIMIT + nccl_faults.SLACK, done
    count(1, max(0.0, done.seconds - nccl_faults.LIMIT))
