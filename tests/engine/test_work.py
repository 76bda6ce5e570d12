"""Work: states, waiting, futures, ownership of buffers."""

import gc
import threading
import time
from datetime import timedelta

import numpy as np
import pytest
import torch
from cases import Check, draw, here, late, poison
from lateness import hear, tell

import hpcdist as dist
from hpcdist import DistTimeoutError, Work
from hpcdist.testing import parallel_assert, parallel_raises

pytestmark = pytest.mark.ranks


def test_states_and_results():
    rank, size = here()
    tensor = torch.full((5,), float(rank))
    work = dist.all_reduce(tensor, async_op=True)
    assert isinstance(work, Work)
    assert work.wait() is True
    parallel_assert(tensor.tolist() == [sum(range(size))] * 5)
    parallel_assert(work.is_completed() and work.is_success())
    parallel_assert(work.exception() is None and work.source_rank() == -1)
    result = work.result()
    parallel_assert(isinstance(result, list) and len(result) == 1 and result[0] is tensor)
    parallel_assert(work.wait() and work.wait(0.1) and work.wait(timedelta(seconds=1)))
    parallel_assert(work.wait(np.int64(1)) and work.wait(np.float32(0.5)))
    with parallel_raises(TypeError, match="timedelta or seconds, not str"):
        work.wait("1")
    work.synchronize()
    work.block_current_stream()
    with parallel_raises(TypeError):
        Work()
    parallel_assert("all_reduce" in repr(work) and "complete" in repr(work))


def test_results_of_each_operation():
    """result() holds what the operation writes, in the order in which it was given."""
    rank, size = here()
    t, out = torch.ones(4), torch.zeros(4 * size)
    outs = [torch.zeros(4) for _ in range(size)]
    pair = [torch.ones(2), torch.ones(3)]
    small = torch.zeros(2)
    cases = [
        (dist.all_reduce(t, async_op=True), [t]),
        (dist.all_reduce_coalesced(pair, async_op=True), pair),
        (dist.broadcast(t, 0, async_op=True), [t]),
        (dist.reduce(t, 0, async_op=True), [t]),
        (dist.all_gather(outs, t, async_op=True), outs),
        (dist.all_gather_into_tensor(out, t, async_op=True), [out]),
        (dist.gather(t, outs if rank == 0 else None, 0, async_op=True), outs if rank == 0 else []),
        (dist.scatter(t, outs if rank == 0 else None, 0, async_op=True), [t]),
        (dist.reduce_scatter_tensor(small, torch.ones(2 * size), async_op=True), [small]),
        (dist.all_to_all_single(out, torch.ones(4 * size), async_op=True), [out]),
        (dist.barrier(async_op=True), []),
    ]
    for work, want in cases:
        work.wait()
        got = work.result()
        same = len(got) == len(want) and all(a is b for a, b in zip(got, want, strict=True))
        parallel_assert(same, lambda work=work: repr(work))


def test_polling():
    """is_completed becomes true without any wait."""
    rank, size = here()
    tensor = torch.ones(3)
    late(rank, size, 0.2)
    work = dist.all_reduce(tensor, async_op=True)
    began = time.monotonic()
    while not work.is_completed() and time.monotonic() < began + 20:
        time.sleep(0.001)
    parallel_assert(work.is_completed() and work.is_success() and tensor[0] == size)


@pytest.mark.parametrize("timeout", [0.2, timedelta(seconds=0.2)], ids=["float", "timedelta"])
def test_wait_with_timeout(timeout):
    """An early wait raises; the operation goes on and can be waited for again."""
    rank, size = here()
    tensor = torch.ones(3)
    group = dist.new_group()
    if rank == size - 1:
        hear(*range(size))  # who have waited in vain
    work = dist.all_reduce(tensor, group=group, async_op=True)
    took, error = 0.0, None
    if rank != size - 1:
        began = time.monotonic()
        try:
            work.wait(timeout)
        except DistTimeoutError as exc:
            error = exc
        took = time.monotonic() - began
        text = str(error)
        tell(size - 1)
    work.wait()
    if rank != size - 1:
        parallel = isinstance(error, TimeoutError) and "all_reduce" in text and "0.2" in text
        ok = parallel and took > 0.15 and tensor[0] == size
    else:
        ok = bool(tensor[0] == size)
    parallel_assert(ok, lambda: f"{error!r} after {took} s, {tensor}")
    dist.destroy_process_group(group)


def test_wait_of_zero_and_of_what_is_complete():
    rank, size = here()
    work = dist.barrier(async_op=True)
    work.wait()
    parallel_assert(work.wait(0) and work.wait(timedelta(0)))
    with parallel_raises(ValueError):
        work2 = dist.barrier(async_op=True)
        work2.wait()
        work2.wait(float("nan"))


def test_future_of_the_outcome_and_timeout():
    from torch._C._distributed_c10d import WorkResult

    size = here()[1]
    pg = dist.new_group()
    good = dist.all_reduce(torch.ones(3), group=pg, async_op=True)
    parallel_assert(good.get_future_result().wait() == WorkResult.SUCCESS)
    parallel_assert(good.timeout == pg.timeout)
    pg.set_timeout(timedelta(seconds=0.4))
    parallel_assert(good.timeout != pg.timeout)
    found = None
    if size > 1 and pg.rank() == 0:
        late = dist.all_reduce(torch.ones(3), group=pg, async_op=True)
        found = late.timeout, late.get_future_result().wait()
    expected = timedelta(seconds=0.4), WorkResult.TIMEOUT
    parallel_assert(found == (expected if size > 1 and pg.rank() == 0 else None), f"{found}")
    dist.destroy_process_group(pg)


def test_order_of_waits_is_free(rng):
    check, (rank, size) = Check(), here()
    tensors = [torch.full((100,), float(rank + i)) for i in range(30)]
    works = [dist.all_reduce(t, async_op=True) for t in tensors]
    for i in rng.permutation(30):
        works[i].wait()
        check.equal(tensors[i], torch.full((100,), sum(r + float(i) for r in range(size))), f"{i}")
    check.done()


def test_synchronous_among_asynchronous():
    """A synchronous call comes after what was begun before it."""
    check, (rank, size) = Check(), here()
    big, small = torch.ones(300_000), torch.ones(2)
    for _ in range(10):
        big.fill_(1.0)
        work = dist.all_reduce(big, async_op=True)
        small.fill_(rank)
        dist.all_reduce(small)
        check.that(work.is_completed(), "the earlier operation was not complete")
        check.that(float(small[0]) == sum(range(size)), f"small: {small}")
        check.that(bool((big == size).all()), "big")
        work.wait()
    check.done()


def test_dropped_works_keep_their_buffers(rng):
    """200 operations whose Work and tensors are dropped at once; the memory is used meanwhile."""
    check, (rank, size) = Check(), here()
    n = 20_000
    kept = []
    for i in range(200):
        tensor = torch.full((n,), float(i))
        work = dist.all_reduce(tensor, async_op=True)
        if i % 20 == 0:
            kept.append((i, tensor))
        del work, tensor
        scratch = poison(torch.float32, n)  # likely where a freed tensor was
        if i == 100:
            gc.collect()
        del scratch
    parts = [draw(rng, torch.float32, n) for _ in range(size)]
    out = poison(torch.float32, n * size)
    dist.all_gather_into_tensor(out, parts[rank])  # in order: all before it are complete
    check.equal(out, torch.cat(parts), "the operation after them")
    for i, tensor in kept:
        check.equal(tensor, torch.full((n,), float(i * size)), f"operation {i}")
    # receives and sends dropped before their peers come
    peer, source = (rank + 1) % size, (rank - 1) % size
    if size > 1:
        for i in range(50):
            dist.irecv(torch.empty(n), source, tag=i)
        gc.collect()
        inbox = torch.empty(n)
        last = dist.irecv(inbox, source, tag=50)
        for i in range(51):
            dist.isend(torch.full((n,), float(i)), peer, tag=i)
        gc.collect()
        last.wait()
        check.equal(inbox, torch.full((n,), 50.0), "the last message")
        dist.barrier()
    check.done()


def test_dropped_numpy_and_bytearray():
    check = Check()
    for i in range(50):
        dist.all_reduce(np.full(5000, i), async_op=True)
        dist.broadcast(bytearray(5000), 0, async_op=True)
    gc.collect()
    dist.barrier()
    data = bytearray(100)
    work = dist.broadcast(data, 0, async_op=True)
    with pytest.raises(BufferError):
        data.extend(b"x" * 100)  # while it is in flight, its memory must not move
    work.wait()
    check.that(len(data) == 100, "bytearray")
    check.done()


def test_memory_is_given_back():
    """When an operation is complete and its Work is dropped, nothing holds the tensor."""
    import weakref

    rank, size = here()
    array = np.ones(1000)
    ref = weakref.ref(array)
    work = dist.all_reduce(array, async_op=True)
    work.wait()
    del array, work
    for _ in range(20):
        dist.barrier()  # the next submission lets go of what is complete
        time.sleep(0.001)
    gc.collect()
    parallel_assert(ref() is None, "the array is still held")


def test_from_two_threads():
    """Two threads with a group each; neither waits for the other."""
    rank, size = here()
    groups = [dist.new_group(list(range(size))) for _ in range(2)]
    failures = []

    def body(number, group):
        try:
            for i in range(30):
                tensor = torch.full((1000,), float(number + i))
                work = dist.all_reduce(tensor, group=group, async_op=bool(i % 2))
                if work is not None:
                    work.wait()
                if not bool((tensor == size * (number + i)).all()):
                    failures.append((number, i))
        except Exception as exc:
            failures.append((number, repr(exc)))

    threads = [threading.Thread(target=body, args=pair) for pair in enumerate(groups)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for group in groups:
        dist.barrier(group)
        dist.destroy_process_group(group)
    parallel_assert(not failures, lambda: str(failures))


def test_waiting_in_another_thread():
    rank, size = here()
    tensor = torch.ones(10)
    dist.barrier()
    late(rank, size, 0.2)
    work = dist.all_reduce(tensor, async_op=True)
    seen = []
    thread = threading.Thread(target=lambda: seen.append(work.wait()))
    thread.start()
    work.wait()
    thread.join()
    parallel_assert(seen == [True] and tensor[0] == size)


@pytest.mark.mpi(min_size=2)
def test_a_receive_that_is_cancelled_swallows_nothing():
    rank, size = dist.get_rank(), dist.get_world_size()
    left, right = (rank - 1) % size, (rank + 1) % size
    first, second = torch.full((3,), -1.0), torch.empty(3)
    work = dist.irecv(first, left)
    parallel_assert(work.cancel() and work.cancel() is False)
    with parallel_raises(dist.DistError, match="cancelled"):
        work.wait()
    sent = dist.isend(torch.full((3,), float(rank)), right)
    dist.recv(second, left)
    sent.wait()
    parallel_assert(second.tolist() == [left] * 3 and first.tolist() == [-1] * 3)
    with parallel_raises(ValueError, match="only a receive"):
        dist.barrier(async_op=True).cancel()
