"""Many operations, many groups, many starts: nothing grows. And as many Works as one likes."""

import itertools
import time

import numpy as np
import pytest
import torch
from cases import Check, here
from long_form import LONG, deadline
from long_form import size as how_many
from resources import change, growth, held
from worlds import SHORT

import hpcdist as dist
from hpcdist.testing import parallel_assert

pytestmark = pytest.mark.ranks

#: Bytes that a process may grow by: allocators and the MPI libraries round, and settle late.
ALLOWED = 12 << 20 if LONG else 6 << 20


def frequent_calls(size: int) -> list:
    """The quick ones."""
    small, middle, MAX = torch.ones(2), torch.ones(1000), dist.ReduceOp.MAX
    whole, part = torch.empty(10 * size), torch.ones(10)
    return [
        lambda: dist.all_reduce(small, MAX),
        lambda: dist.all_reduce(middle, MAX),
        lambda: dist.broadcast(small, 0),
        lambda: dist.barrier(),
        lambda: dist.all_gather_into_tensor(whole, part),
        lambda: dist.reduce(small, size - 1, MAX),
    ]


def rare_calls(rank: int, size: int) -> list:
    """The others; one that makes several returns how many."""
    small, middle, large = torch.ones(2), torch.ones(1000), torch.ones(30_000)
    each = [torch.empty(10) for _ in range(size)]
    whole, part = torch.empty(10 * size), torch.ones(10)
    left, right, MAX = (rank - 1) % size, (rank + 1) % size, dist.ReduceOp.MAX

    def exchange():
        works = [dist.irecv(each[0], left, tag=3), dist.isend(part, right, tag=3)]
        for work in works:
            work.wait()
        return 2

    def some_async():
        works = [dist.all_reduce(small, dist.ReduceOp.MAX, async_op=True) for _ in range(10)]
        works[-1].wait()
        return 10

    def disagree():
        try:
            dist.all_reduce(small if rank else middle)
        except dist.DistMismatchError:
            pass
        return 1

    def objects():
        dist.all_gather_object([None] * size, {"rank": rank, "text": "x" * 100})
        return 1

    def future():
        future = dist.barrier(async_op=True).get_future()
        future.then(lambda f: None).wait()
        return 1

    return [
        exchange,
        some_async,
        some_async,
        lambda: dist.all_reduce(large, MAX),
        lambda: dist.all_gather(each, part),
        lambda: dist.all_to_all_single(whole, whole.clone()),
        lambda: dist.reduce_scatter_tensor(part, torch.ones(10 * size), MAX),
        lambda: dist.gather(part, each if rank == 0 else None, 0),
        lambda: dist.scatter(part, each if rank == 0 else None, 0),
        objects,
        future,
        disagree if size > 1 else some_async,
    ]


def mixed(rank: int, size: int, rng: np.random.Generator):
    """Endlessly, one operation after the other; each yields its number of calls."""
    frequent, rare = frequent_calls(size), rare_calls(rank, size)
    for each_once in [*frequent, *rare]:  # what starts late: threads, caches
        yield each_once() or 1
    # the first future that is not done starts a thread, which completes it with the message
    inbox = dist.irecv(torch.empty(10), rank, tag=4).get_future()
    dist.isend(torch.ones(10), rank, tag=4).wait()
    inbox.wait()
    while True:
        order = rng.integers(0, len(frequent), 200)
        for number, place in enumerate(order):
            if number % 20:
                frequent[place]()
                yield 1
            else:
                yield rare[int(rng.integers(len(rare)))]() or 1


@deadline(90, long=3 * 3600)
def test_many_operations(rng, count):
    rank, size = here()
    total = how_many(4000, 1_000_000)
    operations = mixed(rank, size, rng)
    done, looks, began = 0, [], time.monotonic()
    for goal in (total // 4, total // 2, total * 3 // 4, total):  # a slope, not a step
        while done < goal:
            done += next(operations)
            count.progress(done, total)
        looks.append(held())
    grown = growth(looks[0], looks[-1], ALLOWED)
    parallel_assert(not grown, f"{grown}: {looks}")
    count(done, (time.monotonic() - began) / done, change(looks[0], looks[-1]))


@deadline(60, long=3600)
def test_many_groups(count):
    rank, size = here()
    x = torch.ones(2)

    total = how_many(150, 10_000)
    made = iter(range(total))

    def make(n: int) -> None:
        for i in itertools.islice(made, n):
            count.progress(i, total)
            group = dist.new_group()
            dist.all_reduce(x, dist.ReduceOp.MAX, group=group)
            if i % 10 == 0:  # with a lane's thread, too
                dist.all_reduce(x, dist.ReduceOp.MAX, group=group, async_op=True).wait()
            dist.destroy_process_group(group)

    make(total // 5)
    before = held()
    make(total)
    after = held()
    grown = growth(before, after, ALLOWED)
    parallel_assert(not grown, grown)
    count(total, grown=change(before, after))


@deadline(60, long=1800)
def test_many_starts(count):
    total = how_many(15, 200)
    begun = iter(range(total))

    def start(n: int) -> None:
        for i in itertools.islice(begun, n):
            count.progress(i, total)
            if dist.is_initialized():
                dist.destroy_process_group()
            dist.init_process_group(timeout=SHORT)
            group = dist.new_group()
            dist.all_reduce(torch.ones(3), group=group, async_op=True).wait()

    start(total // 5)
    before = held()
    start(total)
    after = held()
    grown = growth(before, after, ALLOWED)
    parallel_assert(not grown, grown)
    count(total, grown=change(before, after))


def test_ten_thousand_outstanding_works(count):
    """With their tensors forgotten; waited for from the last to the first."""
    check, (rank, size) = Check(), here()
    n = 10_000
    kept = {}
    works = []
    for i in range(n):
        tensor = torch.full((3,), float(i + rank))
        works.append(dist.all_reduce(tensor, async_op=True))
        if i % 1000 == 0:
            kept[i] = tensor
        del tensor
    for work in reversed(works):
        work.wait()
    for i, tensor in kept.items():
        want = sum(float(i + r) for r in range(size))
        check.that(tensor.tolist() == [want] * 3, f"{i}: {tensor}")
    left, right = (rank - 1) % size, (rank + 1) % size
    inbox = np.zeros(2000, np.int64)
    works = [dist.irecv(inbox[i : i + 1], left, tag=i % 100) for i in range(len(inbox))]
    works += [dist.isend(np.full(1, i), right, tag=i % 100) for i in range(len(inbox))]
    for work in reversed(works):
        work.wait()
    check.that(inbox.tolist() == list(range(len(inbox))), f"{inbox}")
    dist.barrier()
    count(n + len(works))
    check.done()


@pytest.mark.mpi(min_size=2)
def test_works_dropped_before_anybody_comes(count):
    """Thousands of operations that are forgotten with their buffers while they wait for a peer."""
    rank, size = here()
    n = 2000
    dist.barrier()
    if rank == size - 1:
        time.sleep(0.3)
    for i in range(n):
        dist.all_reduce(torch.full((50,), float(i)), async_op=True)
        dist.broadcast(np.full(50, i), 0, async_op=True)
    last = torch.ones(3)
    dist.all_reduce(last)
    parallel_assert(last.tolist() == [size] * 3)
    count(2 * n)
