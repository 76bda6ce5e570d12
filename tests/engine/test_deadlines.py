"""One deadline, from the call to the end: what is queued behind a failure does not wait anew."""

from __future__ import annotations

import os
import signal
import threading
import time
from datetime import timedelta

import pytest
import torch
from cases import Check, here
from lateness import hear, tell
from patience import at_most, patience
from worlds import between_nodes

import hpcdist as dist
from hpcdist.testing import parallel_assert

pytestmark = [pytest.mark.ranks, pytest.mark.mpi(min_size=2)]

#: Seconds: the group's timeout here, and what a busy machine may add.
PATIENCE, SLACK = 0.5, 4.0


@pytest.fixture(params=["shared", "mpi"])
def group(request):
    made = between_nodes() if request.param == "mpi" else dist.new_group()
    made.carrier.timeout = PATIENCE
    yield made
    made.carrier.timeout = 20.0
    dist.barrier(made)
    dist.destroy_process_group(made)


def errors_of(works: list) -> tuple[list[str], float]:
    """Wait for all; their errors, and the seconds until the last one ended."""
    began, texts = time.monotonic(), []
    for work in works:
        try:
            work.wait()
            texts.append("")
        except dist.DistError as error:
            texts.append(f"{type(error).__name__}: {error}")
    return texts, time.monotonic() - began


def test_what_is_queued_behind_a_timeout_fails_with_it(group):
    check, (rank, size) = Check(), here()
    tensors = [torch.full((n,), float(rank)) for n in 4 * (3, 1000, 70_000, 3, 300_000, 1)]
    if rank != size - 1:
        works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
        texts, spent = errors_of(works)
        check.that(spent < PATIENCE + SLACK, f"{spent:.2f} s")
        check.that(texts[0].startswith("DistTimeoutError: "), texts[0])
        check.that(f"rank {size - 1}" in texts[0] or "gave up" in texts[0], texts[0])
        for text in texts[1:]:
            check.that(text.startswith("DistTimeoutError: "), text)
        check.that("was queued behind all_reduce #" in texts[-1], texts[-1])
        check.that("which failed: " in texts[-1], texts[-1])
    dist.barrier()
    if rank == size - 1:  # the same calls, late: none may wait for its peers, who have gone on
        for tensor in tensors:
            texts, spent = errors_of([dist.all_reduce(tensor, group=group, async_op=True)])
            check.that(texts[0].startswith("DistTimeoutError: "), texts[0])
            check.that(spent < SLACK, f"{spent:.2f} s")
    dist.barrier()
    group.carrier.timeout = 20.0
    total = torch.ones(5)
    dist.all_reduce(total, group=group)
    check.that(bool((total == size).all()), f"{total}")
    check.done()


def test_the_clock_of_a_queued_operation_runs_from_its_submission(group):
    """Two behind each other, of which the second is the first one to lack a peer."""
    check, (rank, size) = Check(), here()
    group.carrier.timeout = 8 * PATIENCE
    late = rank == size - 1
    began = time.monotonic()
    if late:
        time.sleep(2 * PATIENCE)
    first = dist.all_reduce(torch.ones(3), group=group, async_op=True)
    if not late:
        second = dist.all_reduce(torch.ones(3), group=group, async_op=True)
    first.wait()
    if not late:
        texts, _ = errors_of([second])
        spent = time.monotonic() - began
        check.that(texts[0].startswith("DistTimeoutError: "), texts[0])
        check.that(spent < 8 * PATIENCE + SLACK * patience(), f"{spent:.2f} s")
        if "timeout after" in texts[0]:
            said = float(texts[0].partition("timeout after ")[2].split()[0])
            check.that(said > 7.5 * PATIENCE, texts[0])
    dist.barrier()
    if late:
        texts, _ = errors_of([dist.all_reduce(torch.ones(3), group=group, async_op=True)])
        check.that(texts[0].startswith("DistTimeoutError: "), texts[0])
    check.done()


def test_a_mismatch_does_not_fail_what_is_queued_behind_it(group):
    check, (rank, size) = Check(), here()
    group.carrier.timeout = 20.0
    works = [dist.all_reduce(torch.ones(3 + (rank == 0)), group=group, async_op=True)]
    total = torch.full((4,), rank + 1.0)
    works.append(dist.all_reduce(total, group=group, async_op=True))
    texts, _ = errors_of(works)
    check.that(texts[0].startswith("DistMismatchError: "), texts[0])
    check.that(not texts[1], texts[1])
    check.that(bool((total == size * (size + 1) / 2).all()), f"{total}")
    check.done()


def test_what_is_begun_after_the_failure_was_seen_runs(group):
    """While operations from before are still in the lane."""
    check, (rank, size) = Check(), here()
    if rank != size - 1:
        works = [dist.all_reduce(torch.ones(3), group=group, async_op=True) for _ in range(4)]
        texts, _ = errors_of(works[:1])
        check.that(texts[0].startswith("DistTimeoutError: "), texts[0])
        tell(size - 1)
        group.carrier.timeout = 20.0
        total = torch.ones(3)
        last = dist.all_reduce(total, group=group, async_op=True)
        texts, _ = errors_of(works[1:])
        check.that(all(text.startswith("DistTimeoutError: ") for text in texts), f"{texts}")
    else:
        hear(*range(size))  # who have seen the failure
        for _ in range(4):
            texts, _ = errors_of([dist.all_reduce(torch.ones(3), group=group, async_op=True)])
            check.that(texts[0].startswith("DistTimeoutError: "), texts[0])
        group.carrier.timeout = 20.0
        total = torch.ones(3)
        last = dist.all_reduce(total, group=group, async_op=True)
    texts, _ = errors_of([last])
    check.that(not texts[0], texts[0])
    check.that(bool((total == size).all()), f"{total}")
    check.done()


def test_the_longest_timeout_there_is():
    """Deadlines that the clock cannot count are none."""
    group = dist.new_group(timeout=timedelta.max)
    for async_op in (False, True):
        total = torch.ones(1000)
        work = dist.all_reduce(total, group=group, async_op=async_op)
        if work is not None:
            work.wait()
        parallel_assert(bool((total == dist.get_world_size()).all()), f"{total}")
    rank, size = here()
    if rank == 0:
        dist.send(torch.ones(3), 1, group=group)
    elif rank == 1:
        dist.recv(torch.ones(3), 0, group=group)
    dist.destroy_process_group(group)


def test_all_buckets_of_a_training_step_share_the_deadline():
    """A peer that does not reach backward costs the timeout once."""
    check, (rank, size) = Check(), here()
    group = dist.new_group(timeout=timedelta(seconds=20))
    layers = [torch.nn.Linear(64, 64) for _ in range(8)]
    model = dist.DistributedDataParallel(
        torch.nn.Sequential(*layers), process_group=group, bucket_cap_mb=0.01
    )
    model(torch.ones(2, 64)).sum().backward()
    dist.barrier()
    if rank != size - 1:
        group.carrier.timeout = PATIENCE
        began, text = time.monotonic(), ""
        try:
            model(torch.ones(2, 64)).sum().backward()
        except dist.DistError as error:
            text = f"{type(error).__name__}: {error}"
        spent = time.monotonic() - began
        check.that(text.startswith("DistTimeoutError"), text)
        check.that(spent < 2 * PATIENCE + SLACK * patience(), f"{spent:.2f} s")
    dist.barrier()
    dist.destroy_process_group(group)
    check.done()


@pytest.mark.one_node
def test_the_tensors_of_one_operation_share_the_deadline():
    """A rank that stops during a later one costs no more than in the first.

    The watchdogs would end the job half a second after the deadline of the whole operation.
    """
    check, (rank, size) = Check(), here()
    pids: list = [None] * size
    dist.all_gather_object(pids, os.getpid())
    group = dist.new_group(timeout=timedelta(seconds=20))
    tensors = [torch.ones(1 << 20) for _ in range(64)]
    dist.all_reduce_coalesced(tensors, group=group)  # the memory is there
    began, text = time.monotonic(), ""

    def stop() -> None:
        for pause, what in ((0.003, signal.SIGSTOP), (0.8, signal.SIGCONT),
                            (0.003, signal.SIGSTOP), (0.6, signal.SIGCONT)):  # fmt: skip
            time.sleep(pause)
            os.kill(pids[-1], what)

    group.carrier.timeout = 1.0
    dist.barrier()
    stopper = threading.Thread(target=stop)
    if rank == 0:
        stopper.start()
    try:
        dist.all_reduce_coalesced(tensors, group=group)
    except dist.DistTimeoutError as error:
        text = str(error)
    spent = time.monotonic() - began
    if rank == 0:
        stopper.join()
    if text:  # else it was done before the rank stopped
        check.that(spent < at_most(3), f"{spent:.2f} s")
    dist.barrier()
    dist.destroy_process_group(group)
    check.done()
