"""What goes wrong in flight is a typed error on every rank, in time, and the job is left usable.

Here each fault that leaves the processes alive, under mpirun. ``test_without_mpi.py`` runs the
same without MPI, and kills ranks.
"""

from __future__ import annotations

import time
from datetime import timedelta

import nccl_faults
import pytest
import standin
from nccl_faults import MODES, Case, Trial

import hpcdist as dist
from hpcdist.testing import parallel_assert, parallel_raises

pytestmark = pytest.mark.standin


@pytest.fixture(scope="module", autouse=True)
def _world(runtime):
    """A default group over both."""
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("cpu:mpi,cuda:nccl", timeout=timedelta(seconds=20))
    with standin.training():
        yield


@pytest.mark.parametrize("mode", MODES)
def test_every_fault(mode, count):
    slowest, problems, number = 0.0, [], 0
    for case in nccl_faults.cases(dist.get_world_size(), mpi=True):
        if case.mode != mode:
            continue
        trial = Trial(case)
        late, problem = trial.run()
        slowest, number = max(slowest, late), number + 1
        problems += [problem] * bool(problem)
        dist.barrier()  # the host's side goes on
        trial.end()
    parallel_assert(not problems, lambda: "; ".join(problems))
    count(number, slowest)


def test_the_future_of_a_failed_operation_has_the_error():
    trial = Trial(Case("hang", "async"))
    with standin.fault(f"hang:0:{trial.number}"):
        work = trial._call(True)
        until = time.monotonic() + nccl_faults.LIMIT + nccl_faults.SLACK
        while work.exception() is None and time.monotonic() < until:
            time.sleep(0.01)
    future = work.get_future()
    with parallel_raises(dist.DistError, match="all_reduce #"):
        future.wait()
    trial.end()


@pytest.mark.mpi(min_size=2)
def test_what_nobody_was_told_comes_out_at_the_end():
    trial = Trial(Case("remote", "sync"))
    with standin.fault(f"remote:0:{trial.number}"):
        trial._call(False)
        standin.Stream(0).synchronize()
    error = None
    try:
        trial.end()
    except dist.DistError as problem:
        error = problem
    told = isinstance(error, nccl_faults.LATE) and "all_reduce #" in str(error)
    parallel_assert(told, lambda: repr(error))
