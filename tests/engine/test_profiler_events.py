"""Operations as torch's own backends show theirs: asynchronous events with shapes."""

from __future__ import annotations

import gc
import os
import threading
import weakref

import numpy as np
import pytest
import torch
from torch.autograd import profiler
from torch.profiler import ProfilerActivity, profile

import hpcdist as dist
from hpcdist import profiler_events
from hpcdist.testing import parallel_assert, parallel_raises

pytestmark = pytest.mark.ranks


def events(function):
    """The events of a function: name, whether it is asynchronous, shapes."""
    with profiler.profile(record_shapes=True) as prof:
        function()
    return [
        (event.name.removeprefix("mpi:"), event.is_async, event.input_shapes)
        for event in prof.function_events
        if event.name.startswith("mpi:")
    ]


def test_each_operation_is_one_event_with_the_shapes_of_its_inputs():
    rank, size = dist.get_rank(), dist.get_world_size()
    t, big = torch.ones(3, 4), torch.ones(3 * size, 4)
    parts = [torch.ones(3, 4) for _ in range(size)]
    lists = [[torch.ones(3, 4), torch.ones(2)] for _ in range(size)]
    mine = parts if rank == 0 else None
    one, all_of_them = [[3, 4]], [[3, 4]] * size
    cases = {
        "all_reduce": (lambda: dist.all_reduce(t), one),
        "all_reduce coalesced": (
            lambda: dist.all_reduce_coalesced([t, torch.ones(2)]),
            [[3, 4], [2]],
        ),
        "all_reduce complex": (lambda: dist.all_reduce(torch.ones(5) * 1j), [[5, 2]]),
        "all_reduce numpy": (lambda: dist.all_reduce(np.ones(3)), []),
        "all_reduce async": (lambda: dist.all_reduce(t, async_op=True).wait(), one),
        "reduce": (lambda: dist.reduce(t, 0), one),
        "broadcast": (lambda: dist.broadcast(t, 0), one),
        "all_gather": (lambda: dist.all_gather(parts, t), one),
        "all_gather coalesced": (
            lambda: dist.all_gather_coalesced(lists, [t, torch.ones(2)]),
            [[3, 4], [2]],
        ),
        "all_gather single": (lambda: dist.all_gather_single(big, t), one),
        "gather": (lambda: dist.gather(t, mine, 0), one),
        "scatter": (lambda: dist.scatter(t, mine, 0), all_of_them if rank == 0 else []),
        "reduce_scatter": (lambda: dist.reduce_scatter(t, parts), all_of_them),
        "reduce_scatter single": (lambda: dist.reduce_scatter_single(t, big), [[3 * size, 4]]),
        "all_to_all": (lambda: dist.all_to_all([t + i for i in range(size)], parts), all_of_them),
        "all_to_all single": (lambda: dist.all_to_all_single(big + 1, big), [[3 * size, 4]]),
        "barrier": (lambda: dist.barrier(), []),
    }
    for name, (call, shapes) in cases.items():
        found = events(call)
        parallel_assert(found == [(name.split()[0], True, shapes)], f"{name}: {found}")


@pytest.mark.mpi(min_size=2)
def test_messages():
    rank, size = dist.get_rank(), dist.get_world_size()
    t = torch.ones(3, 4)

    def ring():
        work = dist.isend(t, (rank + 1) % size)
        dist.recv(torch.empty(3, 4), (rank - 1) % size)
        work.wait()
        work = dist.isend(t, (rank + 1) % size)
        dist.recv(torch.empty(3, 4))
        work.wait()
        work = dist.irecv(torch.empty(3, 4), (rank - 1) % size)
        dist.isend(t, (rank + 1) % size).wait()
        work.wait()

    found = events(ring)
    order = ["send", "recv", "send", "recvAnySource", "recv", "send"]
    parallel_assert(found == [(name, True, [[3, 4]]) for name in order], found)


def test_the_shape_of_a_lazily_conjugated_tensor():
    lazy = torch.ones(3, dtype=torch.complex64).conj()
    with profiler.profile(record_shapes=True) as prof, profiler.record_function("range"):
        profiler_events.end(profiler_events.begin("some", "gather", [lazy]))
    shapes = [e.input_shapes for e in prof.function_events if e.name == "some:gather"]
    parallel_assert(shapes == [[[3, 2]]], lambda: str(shapes))


def test_a_training_step_under_both_profilers():
    net = dist.DistributedDataParallel(
        torch.nn.Linear(5, 2, bias=False), find_unused_parameters=True
    )

    def step():
        net(torch.ones(3, 5)).sum().backward()

    step()
    with profile(activities=[ProfilerActivity.CPU]) as prof:
        step()
        step()
    names = [event.name for event in prof.events()]
    parallel_assert(names.count("mpi:all_reduce") >= 2, names)
    search = "torch.distributed.ddp.reducer::search_unused_parameters"
    parallel_assert(names.count(search) == 2, names)
    found = [is_async for name, is_async, _ in events(step) if name == "all_reduce"]
    parallel_assert(bool(found) and all(found), found)


@pytest.mark.mpi(min_size=2)
def test_an_event_ends_with_a_failure_and_with_the_profiler_of_another_thread():
    rank = dist.get_rank()

    def fail():
        with parallel_raises(dist.DistMismatchError):
            dist.all_reduce(torch.ones(2 + rank))

    found = [name for name, *_ in events(fail)]
    parallel_assert(found.count("all_reduce") >= 1, found)

    def elsewhere():
        thread = threading.Thread(target=lambda: dist.all_reduce(torch.ones(2)))
        thread.start()
        thread.join()

    for _ in range(20):
        events(elsewhere)
    found = events(lambda: dist.all_reduce(torch.ones(2)))
    parallel_assert(found == [("all_reduce", True, [[2]])], found)


def test_on_one_rank_only():
    if dist.get_rank() == 0:
        found = events(lambda: dist.all_reduce(torch.ones(2)))
    else:
        dist.all_reduce(torch.ones(2))
        found = [("all_reduce", True, [[2]])]
    parallel_assert(found == [("all_reduce", True, [[2]])], found)


def test_an_event_of_a_forked_child_ends():
    from hpcdist import profiler_events

    profiler_events.end(profiler_events.begin("mpi", "barrier", None))
    child = os.fork()
    if child == 0:
        profiler_events.end(profiler_events.begin("mpi", "barrier", None))
        os._exit(7)
    parallel_assert(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7)


@pytest.mark.one_node
@pytest.mark.mpi(min_size=2)
def test_crossed_groups_are_found_after_a_profile():
    """The thread in which events end calls no operation: no rank waits for it to."""
    events(lambda: dist.all_reduce(torch.ones(3)))
    a, b = dist.new_group(), dist.new_group()
    outcomes = []
    for group in (b, a) if dist.get_rank() == 0 else (a, b):
        try:
            dist.barrier(group)
            outcomes.append("done")
        except dist.DistMismatchError as error:
            outcomes.append("told" if "order in which they use" in str(error) else str(error))
    parallel_assert("told" in outcomes and set(outcomes) <= {"told", "done"}, outcomes)
    for group in (a, b):
        dist.destroy_process_group(group)


def test_a_message_whose_event_could_not_begin_is_not_sent(monkeypatch):
    """A signal handler may raise in the profiler's Python code: nothing is in flight then."""
    rank, size = dist.get_rank(), dist.get_world_size()

    def raises(*_):
        raise KeyboardInterrupt

    tensor = torch.ones(3)
    gone = weakref.ref(tensor)
    with monkeypatch.context() as patch, profile(activities=[ProfilerActivity.CPU]):
        patch.setattr("hpcdist.profiler_events.begin_own", raises)
        with pytest.raises(KeyboardInterrupt):
            dist.isend(tensor, (rank + 1) % size)
    del tensor
    gc.collect()
    parallel_assert(gone() is None, "the tensor is kept")
