"""One thread is inside NCCL while another destroys or aborts: each raises or ends well.

The stand-in counts every use of a communicator that was freed, and every one that is freed while a
call is inside; both are uses of freed memory in NCCL.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import standin
import torch
from standin import cpu, gpu

import hpcdist as dist
from hpcdist import _nccl
from hpcdist._nccl import Communicator, Group
from hpcdist.backends.dispatch import serving
from hpcdist.testing import parallel_assert

pytestmark = pytest.mark.standin

ROUNDS = 12
LATER = 0.004


@pytest.fixture(autouse=True)
def _no_misuse(runtime) -> Iterator[None]:
    before = standin.misuses()
    yield
    found = standin.misuses() - before
    parallel_assert(not found, lambda: f"{found} uses of freed communicators, see standard error")


def alone(blocking: bool) -> Communicator:
    """A communicator of this rank only."""
    return Communicator.init(_nccl.unique_id(), 1, 0, blocking, 10.0)


def together(calls: list[Callable[[], Any]], end: Callable[[], Any]) -> list[str]:
    """Make each call again and again in a thread, and end the communicator; what is wrong."""
    wrong: list[str] = []
    began = threading.Barrier(len(calls) + 1)

    def again(call: Callable[[], Any]) -> None:
        began.wait(5.0)
        try:
            while True:
                call()
        except dist.DistError as error:
            if not any(word in str(error) for word in ("has been", "has aborted")):
                wrong.append(repr(error))
        except BaseException as error:
            wrong.append(repr(error))

    threads = [threading.Thread(target=again, args=(call,), daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    began.wait(5.0)
    time.sleep(LATER)
    try:
        end()
    except BaseException as error:
        wrong.append(repr(error))
    for thread in threads:
        thread.join(5.0)
        if thread.is_alive():
            wrong.append("a thread did not come back")
    return wrong


@pytest.mark.parametrize("blocking", [True, False], ids=["blocking", "nonblocking"])
@pytest.mark.parametrize("ending", ["abort", "destroy"])
def test_calls_of_other_threads_come_out_first(ending, blocking):
    wrong = []
    data = torch.ones(4)
    at = data.data_ptr()
    for turn in range(ROUNDS):
        comm = alone(blocking)

        def operate(comm=comm):
            comm.all_reduce(at, at, 4, _nccl.FLOAT32, _nccl.SUM, 0)

        def several(comm=comm):
            with Group(comm):
                comm.send(at, 1, _nccl.FLOAT32, 0, 0)
                comm.recv(at + 8, 1, _nccl.FLOAT32, 0, 0)

        def ask(comm=comm):
            error = comm.async_error()
            if error is not None or comm.state != "ready":
                raise dist.DistBackendError(f"has been asked: {error}")

        def factor(comm=comm):
            comm.premul_sum(time.monotonic(), _nccl.FLOAT32)

        def place(comm=comm):
            _ = comm.device

        calls = (operate, several, factor, place)
        with standin.slow_calls(0.002):
            wrong += together([calls[turn % len(calls)], ask], getattr(comm, ending))
    parallel_assert(not wrong, lambda: "; ".join(wrong))


@pytest.fixture
def group(runtime) -> Iterator[Any]:
    """A group of all ranks over NCCL, with a communicator."""
    if not dist.is_initialized() or "nccl" not in dist.get_backend():
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("cpu:mpi,cuda:nccl")
    made = dist.new_group()
    dist.all_reduce(gpu(torch.ones(4)), group=made)
    yield made


def waits(work: Any) -> tuple[threading.Thread, list[Any]]:
    """A thread that waits for an operation, and what came of it."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(work.wait(20.0))
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, found


def test_a_group_is_destroyed_while_threads_wait(group):
    backend = serving(group.carrier, gpu(torch.ones(1)))
    tensors = [gpu(torch.ones(4)) for _ in range(3)]
    with standin.fault(f"delay:0:{backend.seq + 1}:0.3"):
        works = [dist.all_reduce(each, group=group, async_op=True) for each in tensors]
        threads = [waits(work) for work in works]
        with standin.slow_calls(0.002):
            dist.destroy_process_group(group)
        for thread, _ in threads:
            thread.join(10.0)
    size = dist.get_world_size()
    fine = all(found == [True] for _, found in threads)
    fine = fine and all(bool((cpu(each) == size).all()) for each in tensors)
    parallel_assert(fine, lambda: str([found for _, found in threads]))


def test_what_an_abort_stops_has_no_result(group):
    backend = serving(group.carrier, gpu(torch.ones(1)))
    tensor = gpu(torch.ones(4))
    with standin.fault(f"hang:{dist.get_world_size() - 1}:{backend.seq + 1}"):
        work = dist.all_reduce(tensor, group=group, async_op=True)
        thread, found = waits(work)
        time.sleep(0.05)
        with standin.slow_calls(0.002):
            backend.abort()
        thread.join(10.0)
    # another rank's abort may come first: then that rank has left
    told = len(found) == 1 and (
        isinstance(found[0], dist.RankFailedError)
        or (isinstance(found[0], dist.DistBackendError) and "has no result" in str(found[0]))
    )
    parallel_assert(told, lambda: repr(found))
    parallel_assert(not work.is_success() and work.exception() is not None, lambda: repr(work))
    refused = ""
    try:
        dist.all_reduce(tensor, group=group)
    except dist.DistBackendError as error:
        refused = str(error)
    parallel_assert("aborted" in refused, lambda: refused)
    dist.destroy_process_group(group)


def test_a_group_is_aborted_under_threads_that_use_it(group):
    """As after an error on this rank: what other threads begin or wait for raises."""
    backend = serving(group.carrier, gpu(torch.ones(1)))

    def call() -> None:
        dist.all_reduce(gpu(torch.ones(4)), group=group, async_op=True).wait(5.0)

    errors: list[BaseException] = []

    def again() -> None:
        try:
            while True:
                call()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=again, daemon=True)
    thread.start()
    time.sleep(0.05)
    with standin.slow_calls(0.002):
        backend.abort()
    thread.join(10.0)
    ended = len(errors) == 1 and isinstance(errors[0], dist.DistError)
    parallel_assert(ended and not thread.is_alive(), lambda: repr(errors))
    dist.destroy_process_group(group)
