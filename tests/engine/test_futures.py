"""Futures of Works: their values, their errors, and callbacks that wait themselves."""

import contextlib
import threading
import time

import pytest
import torch
from cases import here, late

import hpcdist as dist
from hpcdist.testing import parallel_assert, parallel_raises

pytestmark = pytest.mark.ranks


def test_futures():
    rank, size = here()
    tensor = torch.ones(3)
    dist.barrier()
    late(rank, size, 0.2)
    work = dist.all_reduce(tensor, async_op=True)
    future = work.get_future()
    assert isinstance(future, torch.futures.Future)
    chained = future.then(lambda f: f.value()[0].sum().item()).then(lambda f: f.value() + 0.5)
    parallel_assert(chained.wait() == 3 * size + 0.5)
    parallel_assert(future.done() and future.value()[0] is tensor)
    parallel_assert(work.is_completed() and work.get_future() is future)
    # a future of a Work that is complete already
    parallel_assert(work.get_future().then(lambda f: len(f.value())).wait() == 1)
    # many of them, waited for together
    tensors = [torch.full((2,), float(i)) for i in range(20)]
    futures = [dist.all_reduce(t, async_op=True).get_future() for t in tensors]
    values = torch.futures.wait_all(futures)
    sums = [float(value[0][0]) for value in values]
    parallel_assert(sums == [float(i * size) for i in range(20)])


def test_a_callback_may_wait_for_operations_of_its_own():
    """As torch's quantization hooks do: nobody else is there to complete what it waits for."""
    rank, size = here()

    def again(depth):
        if depth == 0:
            return float(size)
        tensor = torch.ones(2)
        future = dist.all_reduce(tensor, async_op=True).get_future()
        return future.then(lambda f: again(depth - 1)).wait()

    for _ in range(3):
        late(rank, size, 0.05)
        work = dist.all_reduce(torch.ones(2), async_op=True)
        chained = work.get_future().then(lambda f: again(2))
        parallel_assert(chained.wait() == size)
    # Afterwards callbacks run one after the other again. What comes to a future that is done
    # runs at once, in the thread that brings it, and is not asked.
    seen, main = [], threading.current_thread()

    def note(i):
        if threading.current_thread() is not main:
            seen.append(i)

    late(rank, size, 0.05)
    futures = [dist.barrier(async_op=True).get_future() for _ in range(20)]
    torch.futures.wait_all([f.then(lambda f, i=i: note(i)) for i, f in enumerate(futures)])
    parallel_assert(seen == sorted(seen), str(seen))


def test_callbacks_of_several_groups_wait_at_once():
    size = here()[1]
    groups = [dist.new_group() for _ in range(4)]

    def again(group, depth):
        if depth == 0:
            return float(size)
        future = dist.all_reduce(torch.ones(2), group=group, async_op=True).get_future()
        return future.then(lambda f: again(group, depth - 1)).wait()

    for _ in range(20):
        works = [dist.all_reduce(torch.ones(2), group=group, async_op=True) for group in groups]
        found = [
            work.get_future().then(lambda f, group=group: again(group, 2))
            for work, group in zip(works, groups, strict=True)
        ]
        parallel_assert([each.wait() for each in found] == [size] * 4)
    for group in groups:
        dist.destroy_process_group(group)


def test_a_failing_callback_harms_nobody():
    rank, size = here()
    work = dist.barrier(async_op=True)
    broken = work.get_future().then(lambda f: 1 / 0)
    work.wait()
    with parallel_raises(RuntimeError, match="ZeroDivisionError"):
        broken.wait()
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    parallel_assert(tensor.item() == size)


def test_error_in_the_future():
    """A mismatch arrives as the Work's exception and through its future."""
    rank, size = here()
    if size == 1:
        return
    work = dist.all_reduce(torch.ones(3 + rank), async_op=True)
    future = work.get_future()
    error = None
    try:
        future.wait()
    except Exception as exc:
        error = exc
    with parallel_raises(dist.DistMismatchError):
        work.wait()
    parallel_assert(error is not None and "all_reduce" in str(error), lambda: repr(error))
    parallel_assert(work.is_completed() and not work.is_success())
    parallel_assert(isinstance(work.exception(), dist.DistMismatchError))
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    parallel_assert(tensor.item() == size)


@pytest.mark.parametrize("trouble", ["no thread", "a handler raises", "another thread"])
def test_a_future_that_could_not_be_made_is_made_again(trouble, monkeypatch):
    """No thread could be started for it, or another thread came first."""
    rank, size = here()
    start, future = threading.Thread.start, torch.futures.Future
    found: list = []

    def raises(self):
        if trouble == "a handler raises":
            start(self)
        raise RuntimeError("can't start new thread")

    def beside():
        if not found:
            found.append(None)
            found[0] = work.get_future()
        return future()

    dist.barrier()
    late(rank, size, 0.3)
    work = dist.all_reduce(torch.ones(3), async_op=True)
    with monkeypatch.context() as patch:
        if trouble == "another thread":
            patch.setattr(torch.futures, "Future", beside)
        else:
            patch.setattr(threading.Thread, "start", raises)
        with contextlib.suppress(RuntimeError):
            found.append(work.get_future())
    found.append(work.get_future())
    work.wait()
    for _ in range(200):
        if all(each.done() for each in found):
            break
        time.sleep(0.01)
    parallel_assert(all(each.done() for each in found))
    parallel_assert(all(each is found[0] for each in found))
