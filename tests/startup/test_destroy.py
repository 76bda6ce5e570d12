"""What is left of a group that is destroyed does not come up in the next one.

MPI gives the number of a communicator that was freed to the next one. A message that is still on
its way then would be taken for one of the new communicator: with Open MPI it ended the job.
"""

from __future__ import annotations

import threading
import time

import pytest
import torch
from cases import here
from long_form import size as how_many
from mpi4py import MPI
from patience import hasty_group

import hpcdist as dist
from hpcdist.testing import parallel_assert

pytestmark = pytest.mark.ranks

TAG = 3


def receives_nothing(group: dist.ProcessGroup) -> None:
    """A receive in a group in which nothing was sent."""
    data = torch.full((4,), -1.0)
    work = dist.irecv(data, group=group, tag=TAG)
    time.sleep(0.05)
    taken = work.cancel()
    parallel_assert(taken and bool((data == -1).all()), lambda: f"received {data}")


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("transport", ["shared", "mpi"])
@pytest.mark.parametrize("late", [False, True], ids=["before", "after the receiver destroyed it"])
def test_messages_that_nobody_received(
    late: bool, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if transport == "mpi":  # as between nodes
        monkeypatch.setenv("HPCDIST_CHECK_TRANSPORT", "mpi")
    rank, size = here()
    group = hasty_group(0.5)
    sender = size - 1
    if late and rank == 0:
        dist.destroy_process_group(group)
    dist.barrier()
    long = torch.full((100_000,), 7.0)
    if rank == sender:
        dist.send(torch.full((4,), 7.0), 0, group=group, tag=TAG)
        dist.isend(long, 0, group=group, tag=TAG)
    dist.barrier()
    if not (late and rank == 0):
        try:
            dist.destroy_process_group(group)
        except dist.DistTimeoutError as error:  # the long one was not taken
            assert rank == sender, error
    for _ in range(3):
        alone = dist.new_group([rank], use_local_synchronization=True)
        receives_nothing(alone)
        both = dist.new_group()
        receives_nothing(both)
        dist.destroy_process_group(alone)
        dist.destroy_process_group(both)


@pytest.mark.mpi(min_size=2)
def test_who_destroys_a_group_alone_does_not_wait_long() -> None:
    rank, _ = here()
    group = hasty_group(0.5)
    took = 0.0
    if rank == 0:
        began = time.monotonic()
        dist.destroy_process_group(group)
        took = time.monotonic() - began
    parallel_assert(took < 5.0, lambda: f"{took:.2f} s")
    dist.barrier()
    if rank:
        with pytest.raises(dist.DistMismatchError, match="rank 0"):
            dist.all_reduce(torch.ones(3), group=group)
        dist.destroy_process_group(group)


def test_groups_that_are_destroyed_together_give_their_communicators_back() -> None:
    """The Fortran handle of one that is kept is never given again; those of C are addresses."""
    handles = set()
    for _ in range(20):
        group = dist.new_group()
        handles.add(MPI.Comm.fromhandle(group.carrier.handle).py2f())
        dist.all_reduce(torch.ones(3), group=group)
        rank, size = here()
        if size > 1:
            works = dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, torch.ones(3), (rank + 1) % size, group),
                    dist.P2POp(dist.irecv, torch.ones(3), (rank - 1) % size, group),
                ]
            )
            for work in works:
                work.wait()
        dist.destroy_process_group(group)
    parallel_assert(len(handles) < 5, lambda: f"{len(handles)} communicators")


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("transport", ["shared", "mpi"])
def test_groups_that_are_destroyed_one_after_the_other_give_them_back_too(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that does not wait for the others frees the communicator with a later group."""
    if transport == "mpi":
        monkeypatch.setenv("HPCDIST_CHECK_TRANSPORT", "mpi")
    rank, size = here()
    handles, rounds = set(), how_many(40, 10_000)
    for number in range(rounds):
        group = dist.new_group()
        handles.add(MPI.Comm.fromhandle(group.carrier.handle).py2f())
        dist.all_reduce(torch.ones(3), group=group)
        if rank == number % size:
            time.sleep(0.02 if number < 50 else 0.002)
        group.carrier.free(0.01 if number < 50 else 0.001)
        dist.destroy_process_group(group)
    parallel_assert(len(handles) < rounds // 2, lambda: f"{len(handles)} communicators")


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("how", ["wait", "recv", "poll"])
def test_threads_that_wait_are_told(how: str) -> None:
    """Whoever waits in a group that another thread destroys gets an error before it is freed."""
    rank, size = here()
    group = dist.new_group()
    data, told = torch.zeros(4), []

    def receive() -> None:
        try:
            if how == "recv":
                dist.recv(data, (rank + 1) % size, group=group)
                return
            work = dist.irecv(data, (rank + 1) % size, group=group)
            while how == "poll" and not work.is_completed():
                pass
            work.wait()
        except dist.DistError as error:
            told.append(str(error))

    thread = threading.Thread(target=receive)
    thread.start()
    time.sleep(0.1)
    began = time.monotonic()
    group.carrier.free(0.2)
    took = time.monotonic() - began
    thread.join(5)
    dist.destroy_process_group(group)
    parallel_assert(
        took < 3 and not thread.is_alive() and len(told) == 1 and "was destroyed" in told[0],
        lambda: f"{took:.2f} s, {told}",
    )


@pytest.mark.mpi(min_size=2)
def test_a_thread_that_makes_a_group_of_it_is_told() -> None:
    """Rank 0 waits for the other members until it destroys the group that all of them are of."""
    rank, size = here()
    parent, told = dist.new_group(), []

    def split() -> None:
        try:
            dist.split_group(parent, [list(range(size))])
        except (dist.DistError, ValueError) as error:
            told.append(str(error))

    threads = [threading.Thread(target=split) for _ in range(2 if rank == 0 else 0)]
    for thread in threads:
        thread.start()
    time.sleep(0.1)
    began = time.monotonic()
    dist.destroy_process_group(parent)
    took = time.monotonic() - began
    for thread in threads:
        thread.join(10)
    dist.barrier()
    parallel_assert(
        took < 5 and len(told) == len(threads) and all("destroy" in each for each in told),
        lambda: f"{took:.2f} s, {told}",
    )


@pytest.mark.parametrize("asynchronous", [False, True])
def test_destroyed_under_calls_of_other_threads(asynchronous: bool) -> None:
    rank, _ = here()
    ended = []

    def exchange(group: dist.ProcessGroup) -> None:
        data, got = torch.ones(3000), torch.zeros(3000)
        try:
            while True:
                works = [dist.irecv(got, rank, group), dist.isend(data, rank, group)]
                works += [dist.all_reduce(torch.ones(1), group=group, async_op=asynchronous)]
                for work in works:
                    if work is not None:
                        work.wait()
        except (dist.DistError, ValueError) as error:
            ended.append(str(error))

    for _ in range(5):
        alone = dist.new_group([rank], use_local_synchronization=True)
        threads = [threading.Thread(target=exchange, args=(alone,)) for _ in range(2)]
        for thread in threads:
            thread.start()
        time.sleep(0.02)
        alone.carrier.free(0.2)  # a receive whose send was refused would hold it up
        dist.destroy_process_group(alone)
        for thread in threads:
            thread.join(10)
    parallel_assert(len(ended) == 10 and all("destroyed" in each for each in ended), f"{ended}")


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("count", [4, 100_000])
def test_a_receive_that_nobody_matches_does_not_hold_it_up(count: int) -> None:
    """A message that comes late is received; one that does not is not waited for until the end."""
    rank, size = here()
    group = dist.new_group()
    sent, got, never = torch.ones(count), torch.zeros(count), torch.full((count,), -1.0)
    told = []

    def receive() -> None:
        try:
            dist.recv(torch.zeros(count), (rank + 1) % size, group=group, tag=9)
        except dist.DistError as error:
            told.append(str(error))

    waiting = threading.Thread(target=receive)
    waiting.start()
    works = [dist.irecv(got, (rank - 1) % size, group, 1), dist.irecv(never, None, group, 2)]
    time.sleep(0.2 if rank else 0.7)  # the threads are in their receives then
    works.append(dist.isend(sent, (rank + 1) % size, group, 1))
    began = time.monotonic()
    dist.destroy_process_group(group)
    took = time.monotonic() - began
    waiting.join(5)
    try:
        works[1].wait()
    except dist.DistError as error:
        told.append(str(error))
    works[0].wait()
    parallel_assert(
        took < 8.0 and len(told) == 2 and all("was destroyed before" in each for each in told),
        lambda: f"{took:.2f} s, {told}",
    )
    parallel_assert(bool((got == 1).all()) and bool((never == -1).all()))
