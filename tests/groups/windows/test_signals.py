"""Windows beside signals of the system, timeouts, threads and children of fork: nothing is lost."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
from breaking import breaking, interrupting
from cases import here, raw, ring

import hpcdist as dist
from hpcdist.testing import parallel_assert, parallel_raises

pytestmark = pytest.mark.ranks

two = pytest.mark.mpi(min_size=2)
#: Whose lines raise.
FILE = "groups/windows/window.py"


@pytest.fixture
def group() -> Iterator[Any]:
    made = dist.new_group()
    yield made
    dist.destroy_process_group(made)


def window_of(group: Any, n: int, dtype: torch.dtype = torch.float32) -> tuple[Any, torch.Tensor]:
    tensor = dist.zeros(n, dtype=dtype, group=group)
    return group.new_window(tensor), tensor


def within(seconds: float) -> dist.WaitSignalOptions:
    return dist.WaitSignalOptions(timeout=timedelta(seconds=seconds))


@contextmanager
def alarms(every: float, handler: Callable[..., None]) -> Iterator[None]:
    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, every, every)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@two
def test_a_wait_that_times_out_as_the_signal_comes(group: Any) -> None:
    """The wait either has the signal, or leaves it to the next one."""
    rank, size = here()
    window, _ = window_of(group, 1)
    count, got, rushed = 1500, 0, random.Random(7)
    if rank == 0:
        for _ in range(count):
            window.signal(1)
            time.sleep(rushed.uniform(2e-4, 1.6e-3))
        window.signal(1)
    elif rank == 1:
        last = time.monotonic()
        while got <= count and time.monotonic() < last + 3:
            try:
                window.wait_signal(0, opts=within(1e-3))
            except dist.DistTimeoutError:
                continue
            got, last = got + 1, time.monotonic()
    parallel_assert(rank != 1 or got == count + 1, lambda: f"{got} of {count + 1}")


@pytest.mark.once
def test_many_windows_have_signals_of_their_own(group: Any) -> None:
    _, _, before, after = ring()
    memory = dist.zeros(1, group=group)
    windows = [group.new_window(memory) for _ in range(1030)]
    windows[0].signal(after)
    dist.barrier(group)
    for window in windows[1:]:
        with pytest.raises(dist.DistTimeoutError, match=f"no signal of rank {before}"):
            window.wait_signal(before, opts=within(0.0))
    windows[0].wait_signal(before)
    dist.barrier(group)


@two
@pytest.mark.parametrize("later", [False, True], ids=["wait", "async"])
def test_an_exception_at_each_line_loses_no_signal(group: Any, later: bool) -> None:
    rank, _ = here()
    window, _ = window_of(group, 1)
    at, lost, goes_on = 0, [], torch.ones(1)
    while goes_on:
        if rank == 0:
            window.signal(1)
        dist.barrier(group)
        broke = rank == 1 and breaking(
            lambda: window.wait_signal(0, async_op=later).wait(), at, FILE
        )
        if broke:
            try:
                window.wait_signal(0, opts=within(2.0))
            except dist.DistTimeoutError:
                lost.append(at)
        goes_on.fill_(broke)
        dist.all_reduce(goes_on)
        at += 1
    parallel_assert(not lost and at > 5, lambda: f"lost at lines {lost} of {at}")


@two
def test_handlers_that_raise_in_waits(group: Any) -> None:
    """In whatever instruction: all signals are received in the end."""
    _, _, before, after = ring()
    window, _ = window_of(group, 1)

    count, got, broken, turns = 300, [], 0, 0
    wait = partial(window.wait_signal, opts=within(2.0))

    def receive() -> None:
        got.extend(map(wait, (before,)))  # what was received is counted at once

    dist.barrier(group)
    for _ in range(count):
        window.signal(after)
    with interrupting() as interrupted, suppress(dist.DistTimeoutError):
        while len(got) < count:
            turns += 1
            broken += interrupted(receive, 1e-5 + turns % 50 * 1e-6) is not None
    parallel_assert(len(got) == count, lambda: f"{len(got)} of {count}, {broken} broken")


@two
def test_handlers_that_raise_again_in_what_follows(group: Any) -> None:
    """The timer repeats: handlers raise while what the first one broke is put in order, too."""
    _, _, before, after = ring()
    window, _ = window_of(group, 1)
    count, got, broken = 300, [], 0
    wait = partial(window.wait_signal, opts=within(2.0))

    def receive() -> None:
        got.extend(map(wait, (before,)))

    dist.barrier(group)
    for _ in range(count):
        window.signal(after)
    with interrupting(every=4e-5) as interrupted, suppress(dist.DistTimeoutError):
        while len(got) < count:
            broken += interrupted(receive, 2e-5) is not None
    parallel_assert(len(got) == count, lambda: f"{len(got)} of {count}, {broken} broken")


@two
def test_a_handler_in_an_accumulate_waits_for_what_is_under_way(group: Any) -> None:
    """The accumulate has no lane of the group: what was begun before goes on meanwhile."""
    rank, _ = here()
    window, memory = window_of(group, 1 << 22)
    ones, said, go_on = torch.ones(1 << 22), [], threading.Event()
    work = None
    if rank == 0:
        work = dist.barrier(group, async_op=True)

    def hold() -> None:  # the memory of rank 0, most of the time
        while not go_on.is_set():
            window.accumulate(ones, 0)

    def handle(*_: object) -> None:
        try:
            work.wait(timedelta(seconds=0.001))
        except dist.DistError as error:
            said.append(f"{error}")

    thread = threading.Thread(target=hold)
    if rank == 0:
        thread.start()
        with alarms(0.02, handle):
            for _ in range(20):
                window.accumulate(ones[:1], 0)
        go_on.set()
        thread.join()
    parallel_assert(not any("after the handler has returned" in text for text in said), f"{said}")
    (work or dist.barrier(group, async_op=True)).wait()


@pytest.mark.parametrize("target", ["own", "other"])
def test_a_handler_that_accumulates_in_an_accumulate(group: Any, target: str) -> None:
    rank, size, _, after = ring()
    window, memory = window_of(group, 1 << 12, torch.int64)
    ones, handled, count = torch.ones(1 << 12, dtype=torch.int64), 0, 3000
    to, inside = rank if target == "own" else after, False

    def handle(*_: object) -> None:
        nonlocal handled, inside
        if inside:  # between nodes it takes longer than from one alarm to the next
            return
        inside = True
        window.accumulate(ones, to)
        handled, inside = handled + 1, False

    dist.barrier(group)
    with alarms(5e-4, handle):
        for _ in range(count):
            window.accumulate(ones, to)
    totals = [torch.zeros(1, dtype=torch.int64) for _ in range(size)]
    dist.all_gather(totals, torch.tensor([count + handled]))
    source = rank if target == "own" else (rank - 1) % size
    parallel_assert(bool((memory == totals[source]).all()), lambda: f"{memory[0]}, {totals}")
    parallel_assert(handled > 0, "no handler ran")


def test_a_handler_during_a_wait_for_the_memory(group: Any) -> None:
    """Other threads hold it most of the time; the handler comes between two of them."""
    rank, size = here()
    window, memory = window_of(group, 1 << 21, torch.int32)
    ones = torch.ones(1 << 21, dtype=torch.int32)
    counts = torch.zeros(1, dtype=torch.int32)
    go_on = threading.Event()

    def busy() -> None:
        while not go_on.is_set():
            window.accumulate(ones, 0)
            counts.add_(1)

    def handle(*_: object) -> None:
        window.accumulate(ones, 0)
        handled.append(1)

    handled: list[int] = []
    thread = threading.Thread(target=busy)
    dist.barrier(group)
    thread.start()
    with alarms(0.03, handle):
        for _ in range(10):
            window.accumulate(ones, 0)
    go_on.set()
    thread.join()
    counts += 10 + len(handled)
    dist.all_reduce(counts)
    parallel_assert(rank != 0 or bool((memory == counts).all()), lambda: f"{memory[0]}, {counts}")


@two
def test_a_registration_that_one_rank_missed(group: Any) -> None:
    """It has counted fewer windows than the others, whose signals it must get all the same."""
    rank, _, before, after = ring()
    memory = dist.zeros(1, group=group)
    for at in range(3):
        broke = False
        with suppress(dist.DistError):
            broke = breaking(
                lambda: group.new_window(memory), at if rank == 0 else 10**6,
                "groups/windows/memory.py",
            )  # fmt: skip
        if broke:  # in place of the call that the others wait in
            with suppress(dist.DistMismatchError):
                dist.barrier(group)
        parallel_assert(broke or rank > 0)
        window = group.new_window(memory)
        window.signal(after)
        window.wait_signal(before, opts=within(2.0))


@two
def test_a_signal_that_nobody_took_is_not_for_the_next_registration(group: Any) -> None:
    _, _, before, after = ring()
    window, _ = window_of(group, 1)
    with parallel_raises(dist.DistTimeoutError):
        window.wait_signal(before, opts=within(0.1))
    dist.barrier()
    window.signal(after)
    dist.barrier()
    window.tensor_deregister()
    window.tensor_register(dist.zeros(1, group=group))
    with parallel_raises(dist.DistTimeoutError):
        window.wait_signal(before, opts=within(0.3))
    window.signal(after)
    window.wait_signal(before)


@two
@pytest.mark.parametrize("later", [False, True])
def test_a_wait_has_its_own_timeout(later: bool) -> None:
    """It may be longer than the group's, and shorter."""
    rank, _, before, after = ring()
    group = dist.new_group()
    window, _ = window_of(group, 1)
    group.timeout = timedelta(seconds=0.5)
    if rank == 0:
        time.sleep(1.0)
    window.signal(after)
    window.wait_signal(before, async_op=later, opts=within(30.0)).wait()
    group.timeout = timedelta(seconds=30)
    for seconds in (0.2, 0.0):
        began = time.monotonic()
        with parallel_raises(dist.DistTimeoutError):
            window.wait_signal(before, async_op=later, opts=within(seconds)).wait()
        parallel_assert(time.monotonic() - began < 10, f"{seconds}")
    dist.destroy_process_group(group)


def test_a_window_closed_while_threads_use_it(group: Any) -> None:
    rank, _, _, after = ring()
    memory, other = dist.zeros(8, group=group), []
    window, go_on = group.new_window(memory), threading.Event()

    def use() -> None:
        one = torch.ones(1)
        while not go_on.is_set():
            try:
                window.put(one, after)
                window.accumulate(one, rank)
            except dist.DistError:
                continue
            except Exception as error:
                other.append(repr(error))
                return

    threads = [threading.Thread(target=use) for _ in range(2)]
    for each in threads:
        each.start()
    for _ in range(50):  # each waits for the interpreter, which the threads hold
        window.tensor_deregister()
        window.tensor_register(memory)
    go_on.set()
    for each in threads:
        each.join()
    parallel_assert(not other, lambda: f"{other}")


def test_threads_of_a_rank_do_not_mix(group: Any) -> None:
    rank, size = here()
    window, memory = window_of(group, 64, torch.int64)
    ones = torch.ones(64, dtype=torch.int64)

    def some() -> None:
        for turn in range(300):
            window.accumulate(ones, turn % size)

    threads = [threading.Thread(target=some) for _ in range(4)]
    dist.barrier(group)
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    dist.barrier(group)
    want = 4 * size * len(range(rank, 300, size))
    parallel_assert(bool((memory == want).all()), lambda: f"{memory[0]} instead of {want}")


def in_child(call: Callable[[], object]) -> str:
    """Text of the DistError that a call raises in a child of fork."""
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            call()
            os.write(writes, b"no exception")
        except dist.DistError as error:
            os.write(writes, str(error).encode())
        except BaseException as error:
            os.write(writes, repr(error).encode())
        os._exit(0)
    os.close(writes)
    with os.fdopen(reads) as told:
        text = told.read()
    os.waitpid(child, 0)
    return text


def test_a_child_of_fork_is_refused(group: Any) -> None:
    rank, size = here()
    window, memory = window_of(group, 100)
    one = torch.ones(1)
    dist.barrier(group)
    texts = {
        name: in_child(call)
        for name, call in (
            ("put", lambda: window.put(one, 0)),
            ("get", lambda: window.get(one, 0)),
            ("accumulate", lambda: window.accumulate(one, 0)),
            ("signal", lambda: window.signal(0)),
            ("wait_signal", lambda: window.wait_signal(0)),
            ("map", lambda: window.map_remote_tensor(0)),
            ("deregister", lambda: window.tensor_deregister()),
        )
    }
    wrong = {name: text for name, text in texts.items() if "fork" not in text}
    parallel_assert(not wrong, lambda: str(wrong))
    parallel_assert(raw(memory) == bytes(400))
    window.accumulate(one, 0)
    dist.barrier(group)
    parallel_assert(rank != 0 or memory[0] == size)
    with parallel_raises(dist.DistTimeoutError):
        window.wait_signal(rank, opts=within(0.01))
