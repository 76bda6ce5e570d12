"""What goes wrong in flight is a typed error on every rank, in time, and the job is left usable.

Here each fault that leaves the processes alive, under mpirun. ``test_without_mpi.py`` runs the
same without MPI, and kills ranks.
"""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import nccl_faults
import pytest
import standin
import torch
from nccl_faults import MODES, Case, Trial
from standin import gpu

import hpcdist as dist
from hpcdist.backends.dispatch import serving
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


def test_aborts_that_wait_for_each_other():
    """Whichever comes first: its operation may only end after the other's, with CUDA's help."""
    trials = [Trial(Case("hang", "async")) for _ in range(2)]
    errors, until = [], time.monotonic() + nccl_faults.LIMIT + nccl_faults.SLACK
    with standin.slow_aborts(), standin.fault(f"hang:0:{trials[0].number}"):
        for work in [trial._call(True) for trial in trials]:
            with pytest.raises(nccl_faults.LATE) as caught:
                work.wait(10.0)
            errors.append((str(caught.value), time.monotonic() < until))
        for trial in trials:
            trial.end()
    parallel_assert(all("all_reduce #" in said and soon for said, soon in errors), f"{errors}")


@pytest.mark.mpi(min_size=2)
def test_a_group_aborts_its_communicators_at_the_same_time():
    trial = Trial(Case("hang", "async"))
    backend = serving(trial.group.carrier, gpu(torch.ones(1)))
    peer = trial.rank ^ 1
    if peer < trial.size:
        message = dist.isend if trial.rank < peer else dist.irecv
        message(gpu(torch.ones(1)), peer, group=trial.group).wait()
    thread = threading.Thread(target=backend.abort, daemon=True)
    with standin.slow_aborts(), standin.fault(f"hang:0:{trial.number}"):
        trial._call(True)
        if peer < trial.size:
            dist.irecv(gpu(torch.ones(1)), peer, group=trial.group)  # nobody sends
        thread.start()
        thread.join(8.0)
        aborted = not thread.is_alive()
    parallel_assert(aborted and len(backend.communicators.all()) == 1 + (peer < trial.size))
    trial.end()


@pytest.mark.parametrize("api", ["all_reduce", "batch_isend_irecv"])
def test_a_call_that_waits_inside_of_nccl_has_a_limit(api):
    """As where NCCL connects the ranks in it, and one of them does not come."""
    trial = Trial(Case("hang", "sync"))
    said, took = f"{api} #2 had not started", 0.0
    calls = [(call, gpu(torch.ones(1)), 0, trial.group) for call in (dist.isend, dist.irecv)]
    if trial.rank == 0:
        with standin.fault(f"block:0:{trial.number}"):
            began = time.monotonic()
            with pytest.raises(dist.DistTimeoutError) as caught:
                if api == "all_reduce":
                    trial._call(False)
                else:
                    dist.batch_isend_irecv([dist.P2POp(*call) for call in calls])
            said, took = str(caught.value), time.monotonic() - began
    parallel_assert(f"{api} #" in said and "had not started" in said, said)
    parallel_assert(took < nccl_faults.LIMIT + 1.0 + nccl_faults.SLACK, f"{took} s")
    trial.end()
