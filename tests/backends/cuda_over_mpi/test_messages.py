"""Messages of CUDA tensors over MPI, also beside a user's own of the same ranks and tags."""

from __future__ import annotations

import itertools
import threading

import cases
import pytest
import torch
from over_mpi import CHUNK, empty, equal, sizes
from standin import cpu, gpu

import hpcdist as dist
from hpcdist.backends.cuda_over_mpi import messages
from hpcdist.testing import parallel_assert, parallel_raises

pytestmark = [pytest.mark.standin, pytest.mark.usefixtures("over_mpi"), pytest.mark.mpi(min_size=2)]


def test_a_users_message_is_never_taken_for_a_part_of_a_long_one():
    """Of whatever type, tag and length: the parts of a long tensor are of kinds of their own."""
    rank, group = dist.get_rank(), dist.new_group()
    kinds = (torch.float8_e8m0fnu, torch.float8_e5m2fnuz)
    sizes = (40, 32, CHUNK)
    n = 3 * CHUNK // 4 + 5
    wrong = []
    users = [
        torch.full((size,), number + 1, dtype=torch.uint8).view(kind)
        for number, (kind, size) in enumerate(itertools.product(kinds, sizes))
    ]
    if rank == 1:  # the first number of a long message of this group is 0, as the tag
        works = [dist.isend(each, 0, group, 0) for each in users]
        works.append(dist.isend(gpu(torch.arange(n, dtype=torch.float32)), 0, group, 0))
        dist.barrier(group)
        for work in works:
            work.wait()
    else:
        dist.barrier(group)
    if rank == 0:
        dist.recv(out := gpu(torch.zeros(n)), 1, group, 0)
        if not torch.equal(cpu(out), torch.arange(n, dtype=torch.float32)):
            wrong.append("the long one")
        for number, each in enumerate(users):
            dist.recv(here := torch.empty_like(each), 1, group, 0)
            if not torch.equal(here.view(torch.uint8), each.view(torch.uint8)):
                wrong.append(number)
    parallel_assert(not wrong, lambda: str(wrong))
    dist.destroy_process_group(group)


def test_a_long_and_a_short_tensor_do_not_match():
    """Whoever receives is told, whichever of the two is the long one."""
    rank, group = dist.get_rank(), dist.new_group()
    for sent, wanted in ((5, 5000), (5000, 5)):
        work = None
        if rank == 1:
            work = dist.isend(gpu(torch.ones(sent)), 0, group, 3)
        dist.barrier(group)
        text = ""
        if rank == 0:
            try:
                dist.recv(gpu(torch.ones(wanted)), 1, group, 3)
            except dist.DistMismatchError as error:
                text = str(error)
            dist.recv(gpu(torch.ones(sent)), 1, group, 3)
        if work is not None:
            work.wait()
        parallel_assert(rank != 0 or "rank 1 sent" in text, lambda text=text: text)
    dist.destroy_process_group(group)


def test_a_batch_without_a_thread_for_each_message_begins_none(monkeypatch):
    """The first receive would take the next message."""
    rank, start, started, failed = dist.get_rank(), threading.Thread.start, [], False

    def fail_later(self: threading.Thread) -> None:
        started.append(self)
        if len(started) == 2:
            raise RuntimeError("can't start new thread")
        start(self)

    lost, out = empty(5, torch.float32), empty(5, torch.float32)
    if rank == 0:
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", fail_later)
            try:
                dist.batch_isend_irecv(
                    [
                        dist.P2POp(dist.irecv, lost, 1, tag=77),
                        dist.P2POp(dist.isend, gpu(torch.ones(5)), 1, tag=78),
                    ]
                )
            except dist.DistBackendError as error:
                failed = "no thread could be started" in str(error)
        dist.irecv(out, 1, tag=77).wait(5.0)
    elif rank == 1:
        dist.send(gpu(torch.full((5,), 7.0)), 0, tag=77)
    good = rank != 0 or (failed and bool((cpu(out) == 7).all()))
    parallel_assert(good, lambda: f"{failed}, {cpu(out)}")


def test_messages_of_every_size(runtime, rng):
    runtime.lag = 2e-4
    rank, size = dist.get_rank(), dist.get_world_size()
    after, before = (rank + 1) % size, (rank - 1) % size
    for dtype in (torch.float32, torch.bfloat16, torch.complex128, torch.bool):
        for n in (*sizes(dtype), 2 * CHUNK // dtype.itemsize):
            sent = [cases.draw(rng, dtype, n) for _ in range(size)]
            out = empty(n, dtype)
            batch = [dist.P2POp(dist.isend, gpu(sent[rank]), after),
                     dist.P2POp(dist.irecv, out, before)]  # fmt: skip
            for work in dist.batch_isend_irecv(batch):
                work.wait()
            parallel_assert(equal(out, sent[before]), lambda n=n, d=dtype: f"{d} {n}")
            out = empty(n, dtype)
            if rank == 0:
                dist.send(gpu(sent[0]), 1)
            elif rank == 1:
                parallel = dist.recv(out)  # from any rank
                assert parallel == 0 and equal(out, sent[0])
    dist.barrier()


def test_messages_keep_their_order_and_tags(runtime):
    runtime.lag = 2e-4
    rank, good, n = dist.get_rank(), True, 3 * CHUNK // 4
    if rank == 0:
        works = [dist.isend(gpu(torch.full((n + i,), float(i))), 1, tag=i % 2) for i in range(6)]
        works.append(dist.isend(torch.full((4,), 9.0), 1, tag=7))  # of the host
        works.append(dist.isend(gpu(torch.full((5,), 8.0)), 1, tag=8))  # to the host
        for work in works:
            work.wait()
    elif rank == 1:
        outs = [gpu(torch.empty(n + i)) for i in range(6)]
        odd = [dist.irecv(outs[i], 0, tag=1) for i in (1, 3, 5)]
        for work in odd:
            work.wait()
        even = [dist.irecv(outs[i], tag=0) for i in (0, 2, 4)]
        for work in even:
            work.wait()
            good &= work.source_rank() == 0
        good &= all(bool((cpu(out) == i).all()) for i, out in enumerate(outs))
        short, host = gpu(torch.empty(4)), torch.empty(5)
        dist.recv(short, 0, tag=7)
        dist.recv(host, 0, tag=8)
        good &= bool((cpu(short) == 9).all()) and bool((host == 8).all())
    own, back = gpu(torch.full((n,), float(rank))), gpu(torch.empty(n))
    works = [dist.irecv(back, rank), dist.isend(own, rank)]  # to itself
    for work in works:
        work.wait()
    parallel_assert(good)
    parallel_assert(bool((cpu(back) == rank).all()))


def test_a_message_that_does_not_fit(runtime):
    rank, n, said = dist.get_rank(), CHUNK // 4, []
    for sent, wanted in ((3 * n, 2 * n), (2 * n, 5 * n), (n, n - 1)):
        if rank == 0:
            dist.send(gpu(torch.ones(sent)), 1)
        elif rank == 1:
            try:
                dist.recv(gpu(torch.empty(wanted)), 0)
            except dist.DistMismatchError as error:
                said.append(str(error))
        # the next one is not taken for what was left
        if rank == 0:
            dist.send(gpu(torch.full((2 * n,), 2.0)), 1)
        elif rank == 1:
            out = gpu(torch.empty(2 * n))
            dist.recv(out, 0)
            assert bool((cpu(out) == 2).all())
    parallel_assert(rank != 1 or len(said) == 3, lambda: str(said))


@pytest.mark.parametrize("n", [9, 3 * CHUNK // 4 + 5])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_ctrl_c_just_as_a_message_arrives(monkeypatch, n, stage):
    """What has come is received to its end, and nothing of it is taken for the next message."""
    rank, group = dist.get_rank(), dist.new_group()
    finish, calls, wrong = messages._finish, itertools.count(), []

    def pressed(work):
        late = finish(work)
        return KeyboardInterrupt() if next(calls) == stage else late

    if rank == 1:
        for value in (1.0, 2.0):
            dist.send(gpu(torch.full((n,), value)), 0, group, 3)
    elif rank == 0:
        monkeypatch.setattr(messages, "_finish", pressed)
        out = gpu(torch.zeros(n))
        try:
            dist.recv(out, 1, group, 3)
        except KeyboardInterrupt:
            wrong += [] if n > 9 or (cpu(out) == 1).all() else ["not in the tensor"]
        else:
            wrong += ["no exception"] * (n > 9 or stage == 0)
        monkeypatch.setattr(messages, "_finish", finish)
        dist.recv(out, 1, group, 3)
        wrong += [] if (cpu(out) == 2).all() else [str(cpu(out)[:3])]
    parallel_assert(not wrong, lambda: str(wrong))
    dist.destroy_process_group(group)


def test_a_receive_that_arrives_while_it_is_cancelled():
    """The handle's cancel() finds it complete: then it counts as received."""

    class Arrived:
        error = None

        def wait(self):
            raise KeyboardInterrupt

        def cancel(self):
            return False

        def exception(self):
            return self.error

    late, work = messages._finish(Arrived()), Arrived()
    work.error = dist.DistMismatchError("too long")
    parallel_assert(isinstance(late, KeyboardInterrupt))
    with parallel_raises(KeyboardInterrupt):
        messages._finish(work)


@pytest.mark.parametrize("numbers", [None, 3])
def test_a_long_message_that_is_received_after_hundreds_of_others(monkeypatch, numbers):
    """Its parts are not taken for another's, whose number would be the same."""
    chunk = 256 << 10  # MPI keeps shorter ones for the receiver, and is done with them
    monkeypatch.setenv("HPCDIST_CUDA_CHUNK", str(chunk))
    if numbers is not None:
        monkeypatch.setattr(messages, "tags", lambda comm: numbers)
    rank, group, n = dist.get_rank(), dist.new_group(), 2 * chunk // 4 + 5
    short, many = (3, 499) if numbers is None else (n, 5)
    good = True
    if rank == 0:
        first = dist.isend(gpu(torch.full((n,), 1.0)), 1, group, 1)
        for _ in range(many):
            dist.send(gpu(torch.zeros(short)), 1, group, 3)
        last = dist.isend(gpu(torch.full((n,), 2.0)), 1, group, 2)
        for work in (first, last):
            work.wait()
    elif rank == 1:
        for _ in range(many):
            dist.recv(gpu(torch.empty(short)), 0, group, 3)
        for tag in (2, 1):
            dist.recv(out := gpu(torch.empty(n)), 0, group, tag)
            good &= bool((cpu(out) == tag).all())
    parallel_assert(good)
    dist.destroy_process_group(group)


@pytest.mark.parametrize("wrong", ["order", "peer", "tag", "memory"])
def test_a_bad_batch_leaves_no_receive(wrong):
    rank, size, group = dist.get_rank(), dist.get_world_size(), dist.new_group()
    after, before = (rank + 1) % size, (rank - 1) % size
    lost = [gpu(torch.zeros(4)) for _ in range(2)]
    batch = [(False, each, before, 3) for each in lost]
    batch.append(
        {
            "order": (True, gpu(torch.zeros(4, 4)).t(), after, 3),
            "peer": (True, gpu(torch.zeros(4)), size, 3),
            "tag": (True, gpu(torch.zeros(4)), after, -1),
            "memory": (True, lost[0], after, 3),
        }[wrong]
    )
    with parallel_raises(ValueError):
        group.carrier.batch_isend_irecv(batch)
    work = dist.isend(gpu(torch.full((4,), 1.0 + rank)), after, group, 3)
    dist.recv(got := gpu(torch.zeros(4)), before, group, 3)
    work.wait()
    right = bool((cpu(got) == 1.0 + before).all()) and not any(bool(cpu(t).any()) for t in lost)
    parallel_assert(right, lambda: f"{cpu(got)} {[cpu(t) for t in lost]}")
    dist.destroy_process_group(group)
