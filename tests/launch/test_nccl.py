"""NCCL without MPI: processes that meet over a store, as torchrun starts them; and their deaths."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import standin

PROGRAM = str(Path(__file__).with_name("nccl_ranks.py"))


def run(case: str, size: int) -> list[tuple[int, str]]:
    """Exit status and output of each rank."""
    standin.build()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(size),
        "OMP_NUM_THREADS": "1",
    }
    jobs = [
        subprocess.Popen(
            [sys.executable, PROGRAM, case],
            env=env | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        return [(job.wait(), text) for job in jobs for text in [job.communicate(timeout=90)[0]]]
    finally:
        for job in jobs:
            job.kill()


@pytest.mark.parametrize("size", [1, 3])
def test_processes_that_meet_over_a_store(size):
    for rank, (code, text) in enumerate(run("fine", size)):
        assert code == 0 and f"rank {rank} of {size}: fine" in text, text


@pytest.mark.parametrize("case", ["die", "absent"])
def test_a_rank_that_dies_or_does_not_come(case):
    *others, (code, text) = run(case, 3)
    assert code == (-9 if case == "die" else 0), text
    for rank, (code, text) in enumerate(others):
        assert code == 7, text
        kind, seconds, said = re.search(r"(\w+) after ([\d.]+) s: (.*)", text).groups()
        assert kind in ("RankFailedError", "DistTimeoutError"), text
        assert "all_reduce #" in said and f"rank {rank}" in said, said
        assert float(seconds) < 6.0, text  # the timeout is 1 s; the machine may be busy
