"""Windows: puts, gets, accumulates and signals between ranks of a node, and of several nodes."""

import os
import signal
import threading
import time
from datetime import timedelta

import numpy as np
import pytest
import torch
from at_once import at_once
from cases import MOVED, OPS, REDUCED, Check, draw, here, poison, promised, reference, ring
from resources import held

import hpcdist as dist
from hpcdist.testing import parallel_assert, parallel_raises

pytestmark = pytest.mark.ranks

N = 10_007  # elements


@pytest.fixture
def group():
    made = dist.new_group()
    yield made
    dist.destroy_process_group(made)


def window_of(group, n: int = N, dtype: torch.dtype = torch.float32):
    """A window of zeros, and the tensor behind it."""
    tensor = dist.zeros(n, dtype=dtype, group=group)
    return group.new_window(tensor), tensor


def test_what_is_no_group_is_refused_by_name():
    for wrong in (None, 1, "world", object(), [0], dist.GroupMember.NON_GROUP_MEMBER):
        with parallel_raises(TypeError, match="group must be a process group of hpcdist"):
            dist.Window(wrong)


def test_put_and_get_of_every_dtype(rng, group):
    check, (rank, size, before, after) = Check(), ring()
    for dtype in MOVED:
        memory = dist.empty(N + 40 * size, dtype=dtype, group=group)[: N + 40 * rank]
        memory.view(torch.uint8).copy_(poison(dtype, memory.numel()).view(torch.uint8))
        window = group.new_window(memory)
        parts = [draw(rng, dtype, 5_000) for _ in range(size)]
        dist.barrier()
        window.put(parts[rank], after, 7)
        window.put(parts[rank][:0], after, 0)
        window.signal(after)
        window.wait_signal(before)
        want = poison(dtype, memory.numel())
        want[7:5_007] = parts[before]
        check.equal(memory, want, f"{dtype}: put")
        out = poison(dtype, 5_000)
        window.get(out, after, 7)
        check.equal(out, parts[rank], f"{dtype}: get")
        dist.barrier()
        window.tensor_deregister()
    check.done()


def test_other_layouts(rng, group):
    """Of several dimensions, transposed, with gaps; into such tensors too."""
    check, (rank, size, before, after) = Check(), ring()
    window, memory = window_of(group, 24, torch.float64)
    parts = [draw(rng, torch.float64, (4, 6)) for _ in range(size)]
    for form in (lambda t: t, lambda t: t.t(), lambda t: t[::2, 1::2], lambda t: t[:, :0]):
        dist.barrier()
        source = form(parts[rank])
        window.put(source, after)
        dist.barrier()
        want = form(parts[before])
        check.equal(memory[: want.numel()], want.reshape(-1), "put")
        into = form(torch.zeros(4, 6, dtype=torch.float64))
        window.get(into, rank)
        check.equal(into, want, "get")
    check.done()


def test_accumulate_of_every_dtype_and_operation(rng, group):
    """All ranks at once, into the first one's memory."""
    check, (rank, size) = Check(), here()
    for dtype in REDUCED:
        memory = dist.empty(N, dtype=dtype, group=group)
        window = group.new_window(memory)
        for name in ("SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"):
            if not promised(name, dtype):
                continue
            parts = [draw(rng, dtype, 3_000) for _ in range(size + 1)]
            if rank == 0:
                memory.view(torch.uint8).copy_(poison(dtype, N).view(torch.uint8))
                memory[5:3_005] = parts[size]
            dist.barrier()
            window.accumulate(parts[rank], 0, 5, op=OPS[name])
            dist.barrier()
            if rank == 0:
                check.near(memory[5:3_005], *reference(name, parts), f"{name} {dtype}")
                check.equal(memory[3_005:], poison(dtype, N - 3_005), f"{name} {dtype}: behind")
    check.done()


def test_many_accumulates_do_not_mix(group):
    rank, size = here()
    window, memory = window_of(group, 3, torch.int64)
    dist.barrier()
    for turn in range(2_000):
        window.accumulate(torch.tensor([1, rank, turn]), turn % size)
    dist.barrier()
    turns = np.arange(2_000)[np.arange(2_000) % size == rank]
    want = [size * len(turns), sum(range(size)) * len(turns), size * int(turns.sum())]
    parallel_assert(memory.tolist() == want, f"{memory.tolist()} instead of {want}")


@pytest.mark.mpi(min_size=2)
def test_accumulates_through_two_windows_do_not_mix(group):
    """On a node the others map rank 0's memory through one, and ask for it through the other."""
    rank, size, *_ = ring()
    memory = dist.zeros(200_000, dtype=torch.int64, group=group)
    mapped = group.new_window(memory)
    asked = group.new_window(memory if rank == 0 else torch.zeros(1, dtype=torch.int64))
    ones, wrong = torch.ones_like(memory), []

    def add(window):
        try:
            for _ in range(1000):
                window.accumulate(ones, 0)
        except Exception as error:
            wrong.append(repr(error))

    threads = [threading.Thread(target=add, args=(window,)) for window in (mapped, asked)]
    at_once(threads)
    found = memory.unique().tolist() if rank == 0 else [2000 * size]
    parallel_assert(not wrong and found == [2000 * size], lambda: f"{wrong}, {found[:5]}")


def test_signals_are_counted_and_order_what_was_put(group):
    check, (rank, _size, before, after) = Check(), ring()
    window, memory = window_of(group, N)
    other, _ = window_of(group, 4)
    dist.barrier()
    for turn in range(200):
        window.put(torch.full((N,), float(turn + rank)), after)
        window.signal(after)
        window.wait_signal(before)
        check.that(bool((memory == turn + before).all()), f"turn {turn}")
        other.signal(before)  # the reader is done
        other.wait_signal(after)
    works = [window.signal(after, async_op=True) for _ in range(3)]
    waits = [window.wait_signal(before, async_op=True) for _ in range(3)]
    for work in works + waits:
        check.that(work.wait() is True and work.is_completed(), "async")
    window.signal(rank)
    window.wait_signal(rank)
    check.done()


def test_two_windows_at_a_time(rng, group):
    """Over the same tensor and over another; registered one after the other."""
    check, (rank, _size, before, after) = Check(), ring()
    one, memory = window_of(group)
    two = group.new_window()
    two.tensor_register(memory[100:200])
    third, beside = window_of(group)
    dist.barrier()
    two.put(torch.full((3,), rank + 1.0), after, 4)
    third.put(torch.full((2,), rank + 5.0), after)
    dist.barrier()
    check.equal(memory[104:107], torch.full((3,), before + 1.0), "a part of the tensor")
    check.equal(beside[:2], torch.full((2,), before + 5.0), "the other one")
    out = torch.empty(3)
    one.get(out, after, 104)
    check.equal(out, torch.full((3,), rank + 1.0), "through the first")
    with parallel_raises(ValueError, match="do not fit"):
        two.put(torch.zeros(3), after, 98)
    two.tensor_deregister()
    with parallel_raises(dist.DistError, match="no tensor is registered"):
        two.put(torch.zeros(3), after)
    with parallel_raises(dist.DistError, match="no tensor is registered"):
        two.wait_signal(after)
    two.tensor_register(beside)
    two.get(out, rank)
    check.equal(out[:2], torch.full((2,), before + 5.0), "registered again")
    check.done()


@pytest.mark.one_node
def test_mapped_memory_and_attributes(group):
    rank, size, before, after = ring()
    window, memory = window_of(group)
    dist.barrier()
    there = window.map_remote_tensor(after)
    there[3] = rank + 1
    dist.barrier()
    parallel_assert(memory[3] == before + 1 and there.shape == (N,))
    parallel_assert(window.get_attr(after).access_type is dist.WindowAccessType.UNIFIED)
    parallel_assert(group.supports_window)
    dist.barrier()
    there.add_(torch.ones(N, requires_grad=True))  # no part of a graph for later calls
    again = window.map_remote_tensor(after)
    parallel_assert(there.requires_grad and not again.requires_grad)
    there = again
    del window, memory, again
    dist.barrier()
    there.fill_(1)  # it keeps the memory
    dist.barrier()


@pytest.mark.mpi(min_size=2)
def test_a_parameter_that_gets_other_memory(group):
    """The window keeps what was registered; so it is not given to the next tensor."""
    *_, after = ring()
    parameter = torch.nn.Parameter(dist.zeros(N, group=group))
    window = group.new_window(parameter)
    parameter.data = parameter.data.double()  # as module.double() does
    dist.barrier()
    other = dist.full((N,), 5.0, group=group)
    window.put(torch.full((10,), -1.0), after)
    dist.barrier()
    parallel_assert(bool((other == 5).all()))


def test_a_signal_to_oneself_that_nobody_took(group):
    """It is on its way at once, and no reason to wait when the group is destroyed."""
    rank = dist.get_rank()
    own = dist.new_group()
    window, _ = window_of(own)
    parallel_assert(window.signal(rank).is_completed())
    window.signal(rank)
    window.wait_signal(rank)
    began = time.monotonic()
    dist.destroy_process_group(own)
    parallel_assert(time.monotonic() - began < 10, "it was waited for")


def test_empty_tensors(group):
    rank, size, before, after = ring()
    memory = dist.zeros(5, group=group)
    window = group.new_window(memory if rank else memory[:0])
    window.put(torch.empty(0), 0)
    window.accumulate(torch.empty(0), 0)
    with parallel_raises(ValueError, match="which has 0"):
        window.put(torch.ones(1), 0)
    window.signal(after)
    window.wait_signal(before)


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_the_programs_default_device_is_its_own(group, device):
    with torch.device(device):
        memory = dist.zeros(40, device="cpu", group=group)
        window = group.new_window(memory)
        window.put(torch.ones(4, 3, device="cpu").T, group.rank(), 5)
        window.get(memory[5:17].view(4, 3).T, group.rank(), 5)
        window.signal(group.rank())
        window.wait_signal(group.rank(), opts=within(5))
    parallel_assert(memory.sum() == 12)


def within(timeout) -> dist.WaitSignalOptions:
    return dist.WaitSignalOptions(timeout=timeout)


@pytest.mark.mpi(min_size=2)
def test_mistakes_are_errors(group):
    rank, size = here()
    window, memory = window_of(group)
    for what, kind, match in (
        (lambda: window.put(torch.zeros(N + 1), 0), ValueError, "do not fit"),
        (lambda: window.put(torch.zeros(1), 0, N), ValueError, "do not fit"),
        (lambda: window.put(torch.zeros(1), 0, -1), ValueError, "do not fit"),
        (lambda: window.get(torch.zeros(1), size), ValueError, "outside"),
        (lambda: window.get(torch.zeros(1), -1), ValueError, "outside"),
        (lambda: window.signal(size), ValueError, "outside"),
        (lambda: window.put(torch.zeros(1, dtype=torch.float64), 0), TypeError, "float64"),
        (lambda: window.put(torch.zeros(1, device="meta"), 0), TypeError, "meta"),
        (lambda: window.put([1.0], 0), TypeError, "list"),
        (lambda: window.accumulate(torch.zeros(1), 0, op=dist.ReduceOp.AVG), TypeError, "AVG"),
        (lambda: window.accumulate(torch.zeros(1), 0, op=dist.ReduceOp.BOR), TypeError, "BOR"),
        (lambda: window.put(torch.zeros(1), 0, 1.5), TypeError, "float"),
        (
            lambda: window.put(torch.zeros(1), 0, opts="soon"),
            TypeError,
            "opts must be a PutOptions",
        ),
        (lambda: window.get(torch.zeros(1), 0, opts=3), TypeError, "opts must be a PutOptions"),
        (lambda: window.wait_signal(0, opts=within(-1)), ValueError, "zero or more, not -1"),
        (lambda: window.wait_signal(0, opts=within(float("nan"))), ValueError, "not nan"),
        (lambda: window.signal(0, opts=within("soon")), TypeError, "timedelta or seconds, not str"),
    ):
        with parallel_raises(kind, match=match):
            what()
    parallel_assert(bool((memory == 0).all()), "nothing was written")
    with parallel_raises(ValueError, match="registered with this window already"):
        window.tensor_register(memory)
    half = dist.zeros(N, dtype=torch.float16, group=group)
    with parallel_raises(dist.DistMismatchError, match="dtypes"):
        group.new_window(half if rank == 0 else memory)
    with parallel_raises(ValueError if rank == 0 else dist.DistMismatchError, match="contiguous"):
        group.new_window(memory[::2] if rank == 0 else memory)
    with parallel_raises(dist.DistMismatchError, match="tensor_register"):
        group.new_window(memory) if rank == 0 else dist.barrier(group=group)


@pytest.mark.mpi(min_size=2)
def test_waits_end(group):
    rank, size, before, after = ring()
    window, _ = window_of(group)
    soon = dist.WaitSignalOptions(timeout=timedelta(seconds=0.3))
    began = time.monotonic()
    with parallel_raises(dist.DistTimeoutError):
        window.wait_signal(before, opts=soon)
    parallel_assert(0.2 < time.monotonic() - began < 5)
    window.signal(after)
    window.wait_signal(before, opts=soon)  # that timeout has taken no signal
    with parallel_raises(dist.DistTimeoutError):
        window.wait_signal(before, opts=soon)
    dist.barrier()
    if rank == 0:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            window.wait_signal(before)
            text = "no exception"
        except KeyboardInterrupt:
            text = ""
    else:
        text = ""
    parallel_assert(not text, text)
    window.signal(after)
    window.wait_signal(before)


def test_an_accumulate_waits_for_the_one_before(group):
    """Another thread of another rank cannot be stopped inside; so the lock is looked at by time."""
    rank, size = here()
    window, memory = window_of(group, 1 << 20)
    threads = [
        threading.Thread(target=window.accumulate, args=(torch.ones(1 << 20), 0)) for _ in range(4)
    ]
    at_once(threads)
    parallel_assert(rank != 0 or bool((memory == 4 * size).all()))


def test_a_group_destroyed_while_a_window_is_open():
    rank, size, before, after = ring()
    made = dist.new_group()
    window, memory = window_of(made)
    there = window.map_remote_tensor(rank)
    dist.destroy_process_group(made)
    with parallel_raises(dist.DistError, match="has been destroyed"):
        window.put(torch.zeros(1), 0)
    with parallel_raises(dist.DistError, match="has been destroyed"):
        window.signal(0)
    with parallel_raises(ValueError, match="destroyed"):
        made.new_window()
    there.add_(1)
    memory.add_(1)
    dist.barrier()


def test_nothing_is_left_of_windows():
    before = held()
    for _ in range(3):
        made = dist.new_group()
        window, memory = window_of(made)
        dist.barrier()
        window.put(torch.ones(3), 0)
        dist.barrier()
        window.tensor_deregister()
        left, _ = window_of(made)  # not deregistered
        del window, memory, left, _
        dist.destroy_process_group(made)
    after = held()
    parallel_assert((after.mappings, after.files) == (before.mappings, before.files), str(after))
    dist.barrier()
