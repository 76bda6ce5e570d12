"""barrier: nobody leaves before everybody has come."""

import threading
import time
from datetime import timedelta

import pytest
import torch
from cases import Check, here
from lateness import hear, tell

import hpcdist as dist
from hpcdist.testing import parallel_assert, parallel_raises

pytestmark = pytest.mark.ranks


def test_nobody_leaves_early():
    """The last rank comes late; its clock is the same machine's, so times compare."""
    check, (rank, size) = Check(), here()
    for late in range(size):
        for async_op in (False, True):
            dist.barrier()
            if rank == late:
                time.sleep(0.05)
            came = torch.tensor([time.monotonic()], dtype=torch.float64)
            work = dist.barrier(async_op=async_op)
            if async_op:
                check.that(work.wait(), "wait returned False")
            left = time.monotonic()
            all_came = torch.zeros(size, dtype=torch.float64)
            dist.all_gather_into_tensor(all_came, came)
            check.that(left >= float(all_came.max()), f"rank {late} was late, async={async_op}")
    check.done()


def test_async_barrier_does_not_wait():
    rank, size = here()
    dist.barrier()
    group = dist.new_group()
    if rank == size - 1:
        hear(*range(size))  # who have looked
    work = dist.barrier(group, async_op=True)
    early = False
    if rank != size - 1:
        early = work.is_completed()
        tell(size - 1)
    work.wait()
    parallel_assert(not early, "complete before the last rank came")
    parallel_assert(work.is_completed() and work.is_success() and work.exception() is None)
    dist.destroy_process_group(group)


def test_many_barriers_in_a_row():
    works = [dist.barrier(async_op=True) for _ in range(50)]
    for work in works:
        work.wait()
    for _ in range(50):
        dist.barrier()


def test_arguments():
    dist.barrier(device_ids=[0])
    dist.barrier(timeout=timedelta(seconds=30))
    with parallel_raises(TypeError):
        dist.barrier(timeout=3.0)
    with parallel_raises(TypeError):
        dist.barrier(group=3)


def test_groups_do_not_wait_for_each_other():
    rank, size = here()
    alone = dist.new_group([rank], use_local_synchronization=True)
    dist.barrier(alone)
    dist.barrier()
    dist.destroy_process_group(alone)


@pytest.mark.mpi(min_size=2)
def test_a_barriers_timeout_is_its_own():
    """What another thread begins in the group meanwhile has the group's."""
    rank, _ = here()
    usual, found = dist.group.WORLD.timeout, []
    if rank == 0:
        thread = threading.Thread(target=dist.barrier, kwargs={"timeout": timedelta(seconds=20)})
        thread.start()
        time.sleep(0.1)
        found.append(dist.group.WORLD.timeout)
        dist.send(torch.ones(1), 1)
        thread.join()
    elif rank == 1:
        dist.recv(torch.ones(1), 0)
    if rank:
        dist.barrier()
    parallel_assert(all(each == usual for each in found), f"{found}")
