"""Operations that are captured into a CUDA graph and replayed; what cannot be is refused.

The stand-in's streams break a capture off where CUDA does: queries of events by any thread in the
usual mode, waits of the host, events of the other side, communicators that are made meanwhile.
"""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import standin
import torch
from standin import cpu, gpu

import hpcdist as dist
from hpcdist.testing import parallel_assert, parallel_raises

pytestmark = [pytest.mark.standin, pytest.mark.usefixtures("runtime")]


@pytest.fixture(autouse=True, params=["1", "0"], ids=["blocking", "nonblocking"])
def _world(request, monkeypatch, runtime, _process_group):
    """With communicators of both kinds."""
    monkeypatch.setenv("HPCDIST_NCCL_BLOCKING", request.param)
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("cpu:mpi,cuda:nccl", timeout=timedelta(seconds=20))


def test_captured_operations_are_replayed():
    rank, size = dist.get_rank(), dist.get_world_size()
    stream = standin.Stream()
    data, other = gpu(torch.zeros(4)), gpu(torch.zeros(4))
    listed = [gpu(torch.zeros(4)) for _ in range(size)]
    whole, part = gpu(torch.zeros(4 * size)), gpu(torch.zeros(4))
    source = torch.full((4,), rank + 1.0)
    dist.all_reduce(gpu(torch.ones(1)))  # the communicator is there
    # the watchdog has something to look at all the time
    busy = standin.Stream()
    with standin.on(busy):
        busy.kernel(1.0)
        watched = dist.all_reduce(gpu(torch.ones(1)), async_op=True)
    standin.Stream(0).synchronize()
    with standin.Graph(stream) as graph:
        stream.kernel(0.0, data.data_ptr(), source.data_ptr(), data.nbytes)
        dist.all_reduce(data)
        stream.kernel(0.0, other.data_ptr(), data.data_ptr(), data.nbytes)
        work = dist.all_reduce(other, async_op=True)
        time.sleep(0.06)
        parallel_assert(work.wait())
        dist.all_gather(listed, other)
        dist.all_gather_into_tensor(whole, other)
        dist.reduce_scatter_tensor(part, whole)
        dist.broadcast(data, size - 1)
    parallel_assert(graph.error == 0, lambda: f"CUDA's error {graph.error}")
    # nothing has run, and nothing is in flight but what was started outside
    nothing = bool((data.as_subclass(torch.Tensor) == 0).all())
    parallel_assert(nothing and not watched.is_completed())
    watched.wait(10.0)
    for turn in (1.0, 3.0):
        source.fill_(turn * (rank + 1))
        graph.replay()
        stream.synchronize()
        total = turn * sum(range(1, size + 1))
        good = bool((cpu(data) == total).all()) and bool((cpu(other) == total * size).all())
        good &= all(bool((cpu(each) == total * size).all()) for each in [*listed, whole])
        good &= bool((cpu(part) == total * size * size).all())
        parallel_assert(good, lambda turn=turn: str((turn, data, other, part)))
    # the group goes on outside
    data.fill_(1.0)
    parallel_assert(dist.all_reduce(data, async_op=True).wait(10.0))
    parallel_assert(bool((cpu(data) == size).all()))
    with parallel_raises(dist.DistBackendError, match="waited for inside of the capture"):
        work.wait()


@pytest.mark.mpi(min_size=2)
def test_captured_messages():
    rank, stream = dist.get_rank(), standin.Stream()
    data, other = gpu(torch.zeros(4)), gpu(torch.zeros(4))
    source = torch.ones(4)

    def exchange() -> None:
        if rank == 0:
            dist.send(data, 1)
            dist.irecv(other, 1).wait()
        elif rank == 1:
            dist.recv(other, 0)
            dist.isend(data, 0).wait()

    exchange()  # the communicator is there
    standin.Stream(0).synchronize()
    with standin.Graph(stream) as graph:
        stream.kernel(0.0, data.data_ptr(), source.data_ptr(), data.nbytes)
        exchange()
    parallel_assert(graph.error == 0, lambda: f"CUDA's error {graph.error}")
    for turn in (2.0, 3.0):
        source.fill_(turn + rank)
        graph.replay()
        stream.synchronize()
        wanted = turn + 1 - rank
        parallel_assert(rank > 1 or bool((cpu(other) == wanted).all()), lambda: str(other))


def test_what_cannot_be_captured_is_refused_and_breaks_nothing(monkeypatch):
    size = dist.get_world_size()
    stream = standin.Stream()
    data = gpu(torch.ones(4))
    dist.all_reduce(data)
    monkeypatch.setenv("HPCDIST_NCCL_SPLIT", "0")
    fresh = dist.new_group(list(range(size)), use_local_synchronization=True)
    alone = dist.new_group(list(range(size)), backend="nccl", use_local_synchronization=True)
    dist.all_reduce(data, group=alone)
    standin.Stream(0).synchronize()
    data.fill_(1.0)
    stream.kernel(0.5)
    with standin.on(stream):
        before = dist.all_reduce(gpu(torch.ones(1)), async_op=True)
    with standin.Graph(stream) as graph:
        work = dist.all_reduce(data, async_op=True)
        with parallel_raises(dist.DistBackendError, match=r"once before the capture"):
            dist.all_reduce(data, group=fresh)
        with parallel_raises(dist.DistBackendError, match="the host takes part"):
            dist.barrier(group=alone)
        with parallel_raises(dist.DistBackendError, match="the host takes part"):
            dist.broadcast_object_list([1], 0, group=alone)
        with parallel_raises(dist.DistBackendError, match=r"#\d+ .*host cannot wait for it"):
            work.wait(1.0)
        with parallel_raises(dist.DistBackendError, match="cannot be asked"):
            work.is_completed()
        with parallel_raises(dist.DistBackendError, match="started before the capture"):
            before.wait()
        parallel_assert(work.exception() is None)
        work.wait()
    parallel_assert(graph.error == 0, lambda: f"CUDA's error {graph.error}")
    graph.replay()
    stream.synchronize()
    parallel_assert(bool((cpu(data) == size).all()) and before.wait(10.0))
    dist.all_reduce(data, group=fresh)
    dist.barrier(group=alone)
    parallel_assert(bool((cpu(data) == size * size).all()))


def test_calls_that_wait_on_the_host_do_not_while_captured(monkeypatch):
    monkeypatch.setenv("HPCDIST_NCCL_BLOCKING_WAIT", "1")
    group = dist.new_group(list(range(dist.get_world_size())))
    stream, data = standin.Stream(), gpu(torch.ones(4))
    dist.all_reduce(data, group=group)
    data.fill_(1.0)
    with standin.Graph(stream) as graph:
        dist.all_reduce(data, group=group)
        dist.all_reduce(data, group=group, async_op=True).wait()
    graph.replay()
    stream.synchronize()
    parallel_assert(graph.error == 0 and bool((cpu(data) == dist.get_world_size() ** 2).all()))
