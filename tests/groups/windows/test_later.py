"""Windows that ranks reach by messages: calls with async_op, which go on after they return."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import weakref
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
from cases import Check, draw, poison, ring
from patience import wait_for
from remote_windows import all_received, pids_of_ranks, stop, window_of, within

import hpcdist as dist
from hpcdist.testing import parallel_assert, parallel_raises

pytestmark = [pytest.mark.ranks, pytest.mark.mpi(min_size=2)]

#: Bytes that travel with a request, and that do not.
SIZES = (1, 1024, 1025, 70_000, 1_000_001)


@pytest.fixture
def group() -> Iterator[Any]:
    made = dist.new_group(timeout=timedelta(seconds=60))
    yield made
    dist.destroy_process_group(made)


def test_many_in_flight_to_all_ranks(rng: Any, group: Any) -> None:
    """Puts, gets and accumulates of all sizes: each rank has a part of its own in each window."""
    check, (rank, size, *_) = Check(), ring()
    part = sum(SIZES)
    window, memory = window_of(group, size * part, torch.uint8)
    given = [[draw(rng, torch.uint8, n) for n in SIZES] for _ in range(size)]
    added = [[draw(rng, torch.uint8, n) for n in SIZES] for _ in range(size)]
    starts = [sum(SIZES[:i]) for i in range(len(SIZES))]
    works, outs = [], []
    for to in range(size):
        for i, at in enumerate(starts):
            at += rank * part
            outs.append([poison(torch.uint8, SIZES[i]) for _ in range(2)])
            works += [
                window.put(given[rank][i], to, at, async_op=True),
                window.get(outs[-1][0], to, at, async_op=True),
                window.accumulate(added[rank][i], to, at, async_op=True),
                window.get(outs[-1][1], to, at, async_op=True),
                window.put(added[rank][i], to, at, async_op=True),
            ]
    rng.shuffle(works)
    for work in works:
        check.that(work.wait() is True and work.is_success(), f"{work}")
    for i, (first, second) in enumerate(outs):  # a rank's calls take effect in their order
        i %= len(SIZES)
        check.equal(first, given[rank][i], f"get of {SIZES[i]}, first")
        check.equal(second, given[rank][i] + added[rank][i], f"get of {SIZES[i]}, second")
    dist.barrier()
    check.equal(memory, torch.cat([torch.cat(parts) for parts in added]), "memory")
    check.done()


def test_a_signal_comes_after_what_was_put(rng: Any, group: Any) -> None:
    """Also if nobody has waited for it, and through another window."""
    check, (_, _, before, after) = Check(), ring()
    window, memory = window_of(group, 100_000, torch.int64)
    other, _ = window_of(group, 1)
    for turn in range(1, 60):
        n = int(rng.integers(1, 100_000))
        mine = torch.full((n,), turn, dtype=torch.int64)
        window.put(mine, after, 100_000 - n, async_op=True)
        window.accumulate(mine[:3], after, 100_000 - n, async_op=True)
        (other if turn % 2 else window).signal(after)
        mine.fill_(-1)
        (other if turn % 2 else window).wait_signal(before)
        first = int((memory != 0).nonzero()[0])
        check.that(bool((memory[first + 3 :] == turn).all()), f"{turn}: {memory}")
        check.that(bool((memory[first : first + 3] == 2 * turn).all()), f"{turn}: {memory}")
        memory.zero_()
        dist.barrier()
    check.done()


def test_handles(group: Any) -> None:
    rank, _, before, after = ring()
    window, memory = window_of(group, 200_000)
    memory.copy_(torch.arange(200_000.0) + rank)
    dist.barrier()
    for n in (2, 200_000):
        out = torch.zeros(n)
        work = window.get(out, after, async_op=True)
        assert isinstance(work, dist.Work) and "get" in repr(work)
        got = work.get_future().wait()
        assert got[0] is out and work.result()[0] is out
        assert out.tolist() == (torch.arange(float(n)) + after).tolist()
        told: list[Any] = []
        event = threading.Event()
        future = window.put(torch.zeros(0), after, async_op=True).get_future()
        future.then(lambda done, told=told, event=event: (told.append(done.value()), event.set()))
        assert event.wait(30) and told[0][0].numel() == 0
        with pytest.raises(ValueError, match="only a receive can be cancelled"):
            work.cancel()
        assert work.exception() is None and work.wait(1.0) is True
    strided = torch.zeros(10)[::2]
    window.get(strided, after, 3, async_op=True).wait()
    parallel_assert(strided.tolist() == [3.0 + after + i for i in range(5)], f"{strided}")


def test_what_is_refused_is_said_once(group: Any, capfd: Any) -> None:
    """By the Work; by the next signal where nobody has asked the Work."""
    rank, _, before, after = ring()
    window, memory = window_of(group, 3)
    dist.barrier()
    window._parts[after].numel = 1_000_000
    for n in (1, 10_000):
        for begin in (window.put, window.get, window.accumulate):
            work = begin(torch.ones(n), after, 3, async_op=True)
            with pytest.raises(dist.DistBackendError, match="does not fit its memory"):
                work.wait()
            assert isinstance(work.exception(), dist.DistBackendError) and work.is_completed()
            future = begin(torch.ones(n), after, 3, async_op=True).get_future()
            with pytest.raises(dist.DistBackendError, match="does not fit its memory"):
                future.wait()
    window.signal(after)
    window.wait_signal(before)
    window.put(torch.ones(1), after, 3, async_op=True)
    with parallel_raises(dist.DistBackendError, match="does not fit its memory"):
        window.signal(after)
    with parallel_raises(dist.DistTimeoutError, match="no signal of rank"):
        window.wait_signal(before, opts=dist.WaitSignalOptions(timeout=timedelta(seconds=0.1)))
    capfd.readouterr()
    window.get(torch.ones(1), after, 3, async_op=True)
    for _ in range(20):
        window.put(torch.ones(1), after)
    said = capfd.readouterr().err
    parallel_assert(said.count("never waited for: get: rank") == 1, said)
    dist.barrier()


def test_a_rank_that_is_stopped(group: Any) -> None:
    """A call returns at once; a limit of wait() leaves it going on, its own timeout ends it."""
    rank, size = dist.get_rank(), dist.get_world_size()
    window, memory = window_of(group, 300_000)
    pids, texts = pids_of_ranks(), []
    if rank == 0:
        stop(pids[1])
        try:
            later = window.put(torch.full((5,), 3.0), 1, 100, async_op=True)
            works = [
                window.put(torch.ones(1), 1, async_op=True, opts=within(0.3)),
                window.get(torch.ones(300_000), 1, async_op=True, opts=within(0.3)),
            ]
            with pytest.raises(dist.DistTimeoutError, match="it goes on and can be waited for"):
                later.wait(0.1)
            assert not later.is_completed() and later.exception() is None
            for work in works:
                with pytest.raises(dist.DistTimeoutError) as caught:
                    work.wait()
                texts.append(str(caught.value))
        finally:
            os.kill(pids[1], signal.SIGCONT)
        said = zip(texts, ("put", "get"), strict=True)
        wrong = [text for text, what in said if f"in {what}() to rank 1" not in text]
        assert not wrong and later.wait(), wrong
    parallel_assert(all_received(group), "answers that came too late were not received")
    parallel_assert(rank != 1 or memory[100:105].tolist() == [3.0] * 5, f"{memory[100:105]}")
    window.put(torch.full((300_000,), 7.0), (rank + 1) % size, async_op=True).wait()
    dist.barrier()
    parallel_assert(bool((memory == 7).all()), "a call after the timeout")


def test_a_signal_has_a_limit_of_its_own(group: Any) -> None:
    """Also for what it waits for: a rank that is stopped has not answered a put."""
    rank, size = dist.get_rank(), dist.get_world_size()
    window, memory = window_of(group, 3)
    pids, text, took = pids_of_ranks(), "", 0.0
    if rank == 0:
        stop(pids[1])
        woken = threading.Timer(10, os.kill, (pids[1], signal.SIGCONT))
        woken.start()
        try:
            later = window.put(torch.ones(3), 1, async_op=True)
            for asynchronous in (False, True):
                began = time.monotonic()
                with pytest.raises(dist.DistTimeoutError) as caught:
                    window.signal(1, asynchronous, dist.SignalOptions(timedelta(seconds=0.2)))
                text, took = str(caught.value), max(took, time.monotonic() - began)
        finally:
            woken.cancel()
            os.kill(pids[1], signal.SIGCONT)
        assert later.wait()
        window.signal(1, opts=dist.SignalOptions(timedelta(seconds=30)))
    if rank == 1:
        window.wait_signal(0)
    parallel_assert(took < 5, f"the signals raised after {took:.1f} s")
    parallel_assert(rank != 0 or "0.2 s in signal" in text and "answered put" in text, text)
    with parallel_raises(dist.DistTimeoutError, match="no signal of rank"):  # one was sent
        window.wait_signal((rank - 1) % size, opts=dist.WaitSignalOptions(timedelta(seconds=0.1)))
    parallel_assert(rank != 1 or memory.tolist() == [1.0] * 3, f"{memory}")


def test_what_nobody_waits_for_is_let_go(group: Any) -> None:
    rank, _, before, after = ring()
    window, memory = window_of(group, 50_000)
    kept = []
    for n in (1, 50_000) * 5:
        tensor = torch.ones(n)
        kept.append(weakref.ref(tensor))
        window.accumulate(tensor, after, async_op=True)
        del tensor
    window.signal(after)
    window.wait_signal(before)
    gc.collect()
    wait_for(lambda: not any(ref() is not None for ref in kept))
    parallel_assert(memory[:2].tolist() == [10.0, 5.0], f"{memory[:2]}")


def test_deregistration_waits_for_what_was_begun(group: Any) -> None:
    rank, _, before, after = ring()
    window = group.new_window()
    for turn in range(20):
        memory = torch.zeros(30_000)
        window.tensor_register(memory)
        works = [window.put(torch.full((10_000,), turn + 1.0), after, 10_000 * i, async_op=True)
                 for i in range(3)]  # fmt: skip
        window.tensor_deregister()
        assert bool((memory == turn + 1).all()), memory
        assert all(work.is_success() for work in works)
    dist.barrier()
