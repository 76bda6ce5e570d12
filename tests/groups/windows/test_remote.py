"""Windows that ranks reach by messages: ordinary memory, and ranks of several nodes."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from at_once import at_once
from breaking import interrupting
from cases import Check, draw, poison, ring
from patience import wait_for
from remote_windows import all_received, pids_of_ranks, stop, window_of, within

import hpcdist as dist
from hpcdist import _engine
from hpcdist.testing import parallel_assert, parallel_raises

pytestmark = [pytest.mark.ranks, pytest.mark.mpi(min_size=2)]

#: Bytes around what travels with a request, and around an envelope's limits.
SIZES = (1, 12, 13, 14, 1023, 1024, 1025, 2047, 2048, 2049, 70_000, 3_000_001)


@pytest.fixture
def group() -> Iterator[Any]:
    made = dist.new_group(timeout=timedelta(seconds=60))
    yield made
    dist.destroy_process_group(made)


def test_sizes_around_every_limit(rng: Any, group: Any) -> None:
    check, (rank, size, before, after) = Check(), ring()
    window, memory = window_of(group, SIZES[-1] + 9, torch.uint8)
    for n in SIZES:
        parts = [draw(rng, torch.uint8, n) for _ in range(size)]
        memory.copy_(poison(torch.uint8, memory.numel()))
        dist.barrier()
        window.put(parts[rank], after, 5)
        window.signal(after)
        window.wait_signal(before)
        want = poison(torch.uint8, memory.numel())
        want[5 : 5 + n] = parts[before]
        check.equal(memory, want, f"put of {n}")
        out = poison(torch.uint8, n + 3)
        window.get(out[1 : 1 + n], after, 5)
        check.equal(out[1 : 1 + n], parts[rank], f"get of {n}")
        check.equal(out[[0, -2, -1]], poison(torch.uint8, n + 3)[[0, -2, -1]], f"beside {n}")
        dist.barrier()
        memory.zero_()
        dist.barrier()
        window.accumulate(parts[rank], 0, 2)
        dist.barrier()
        if rank == 0:
            total = torch.stack(parts).sum(0, dtype=torch.uint8)
            check.equal(memory[2 : 2 + n], total, f"accumulate of {n}")
            check.that(not memory[2 + n :].any() and not memory[:2].any(), f"behind {n}")
    check.done()


def test_attributes(group: Any) -> None:
    rank, _, _, after = ring()
    window, memory = window_of(group, 3)
    parallel_assert(window.get_attr(after).access_type is dist.WindowAccessType.SEPARATE)
    parallel_assert(window.get_attr(rank).access_type is dist.WindowAccessType.UNIFIED)
    parallel_assert(window.map_remote_tensor(rank).data_ptr() == memory.data_ptr())
    with parallel_raises(dist.DistBackendError, match=f"rank {after} cannot be mapped"):
        window.map_remote_tensor(after)
    window.tensor_deregister()
    with parallel_raises(dist.DistError, match="no tensor is registered"):
        window.get_attr(after)


def test_one_rank_in_ordinary_memory_is_enough(group: Any) -> None:
    rank, _, before, after = ring()
    memory = torch.zeros(4) if rank == 1 else dist.zeros(4, symmetric=False)
    window = group.new_window(memory)
    window.put(torch.full((2,), rank + 1.0), after, 1)
    dist.barrier()
    parallel_assert(memory.tolist() == [0.0, before + 1.0, before + 1.0, 0.0], f"{memory}")


def test_a_rank_that_computes_serves_meanwhile(group: Any) -> None:
    """Rank 0 calls nothing of hpcdist while the others use its memory."""
    rank, size = dist.get_rank(), dist.get_world_size()
    window, memory = window_of(group, 50_000, torch.int64)
    dist.barrier()
    if rank == 0:
        until = time.monotonic() + 20
        while int(memory[-1]) < size - 1 and time.monotonic() < until:
            torch.ones(50, 50) @ torch.ones(50, 50)
    else:
        window.accumulate(torch.ones(50_000, dtype=torch.int64), 0)
    parallel_assert(rank != 0 or int(memory[-1]) == size - 1, f"{memory[-1]}")


def test_calls_in_all_directions_at_once(group: Any) -> None:
    """Threads of each rank put to, get from and add to all the others."""
    rank, size, *_ = ring()
    window, memory = window_of(group, 3 * 4_000, torch.int64)
    wrong: list[str] = []

    def use(thread: int) -> None:
        try:
            use_part(4_000 * thread)
        except Exception as error:
            wrong.append(repr(error))

    def use_part(at: int) -> None:
        for turn in range(40):
            to, n = (rank + 1 + turn) % size, 1 + 397 * (turn % 10)
            window.accumulate(torch.ones(n, dtype=torch.int64), to, at)
            out = torch.full((n,), -1, dtype=torch.int64)
            window.get(out, to, at)
            if int(out.min()) < 1:
                wrong.append(f"{to}, {n}: {out.min()}")

    threads = [threading.Thread(target=use, args=(thread,)) for thread in range(3)]
    at_once(threads)
    want = sum((source + 1 + turn) % size == rank for source in range(size) for turn in range(40))
    parts = memory.view(3, 4_000)[:, 0].tolist()
    parallel_assert(not wrong and parts == [want] * 3, lambda: f"{wrong}, {parts}, not {want}")


def test_a_window_that_was_dropped_still_serves(group: Any) -> None:
    """Its rank has no reference left; the others use theirs until they destroy the group."""
    rank, *_ = ring()
    window, memory = window_of(group, 4)
    kept = weakref.ref(memory)
    dist.barrier()
    if rank == 0:
        del window, memory
        gc.collect()
    else:
        window.accumulate(torch.ones(4), 0)
        out = torch.zeros(4)
        window.get(out, 0)
        assert bool((out >= 1).all())
    parallel_assert(rank != 0 or kept() is None, "the tensor itself is not kept")
    dist.barrier()


def used_by(name: str) -> float:
    """Seconds of a core that this process's threads of a name have used."""
    ticks = 0
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # another thread ends
            if (task / "comm").read_text().strip() == name:
                fields = (task / "stat").read_text().rpartition(")")[2].split()
                ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def test_a_rank_that_is_stopped_ends_a_call_in_time(group: Any, capfd: Any) -> None:
    """No answer within the timeout is an error that says whose; later calls are not harmed."""
    rank, size = dist.get_rank(), dist.get_world_size()
    window, memory = window_of(group, 300_000)
    pids = pids_of_ranks()
    texts: list[str] = []
    if rank == 0:
        stop(pids[1])
        began = time.monotonic()
        try:
            for call in (
                lambda: window.put(torch.ones(1), 1, opts=within(0.3)),
                lambda: window.put(torch.ones(300_000), 1, opts=within(0.3)),
                lambda: window.get(torch.ones(300_000), 1, opts=within(0.3)),
                lambda: window.accumulate(torch.ones(1), 1, opts=within(0.3)),
            ):
                try:
                    call()
                    texts.append("no exception")
                except dist.DistTimeoutError as error:
                    texts.append(f"{error}")
        finally:
            os.kill(pids[1], signal.SIGCONT)
        parts = zip(texts, ("put", "put", "get", "accumulate"), strict=True)
        wrong = [
            text
            for text, what in parts
            if not text.startswith("timeout after 0.3") or f"in {what}() to rank 1" not in text
        ]
        took = time.monotonic() - began
        assert not wrong and took < 20, (wrong, took)
    gc.collect()
    said = capfd.readouterr().err
    parallel_assert("was never waited for" not in said, said)
    parallel_assert(all_received(group), "answers that came too late were not received")
    before = used_by("hpcdist-window")
    time.sleep(1)
    used = used_by("hpcdist-window") - before
    parallel_assert(used < 0.5, f"a get that nobody receives costs {used:.2f} of a core")
    dist.barrier()
    window.put(torch.full((300_000,), 7.0), (rank + 1) % size)
    dist.barrier()
    parallel_assert(bool((memory == 7).all()), "a call after the timeout")


def test_ctrl_c_leaves_a_call(group: Any) -> None:
    rank = dist.get_rank()
    window, memory = window_of(group, 10)
    pids = pids_of_ranks()
    text = ""
    if rank == 0:
        stop(pids[1])
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        threading.Timer(1.0, os.kill, (pids[1], signal.SIGCONT)).start()
        try:
            window.get(torch.ones(10), 1)
            text = "no exception"
        except KeyboardInterrupt:
            pass
        out = torch.ones(10)
        window.get(out, 1)
        text = text or ("" if not out.any() else f"{out}")
    parallel_assert(not text, text)


def test_what_is_not_there_is_refused(group: Any) -> None:
    """The rank itself looks at each request, whatever the others believe of its memory."""
    rank, _, _, after = ring()
    window, memory = window_of(group, 3)
    dist.barrier()
    window._parts[after].numel = 1_000_000
    for n in (1, 10_000):
        with parallel_raises(dist.DistBackendError, match="does not fit its memory"):
            window.put(torch.ones(n), after, 3)
        with parallel_raises(dist.DistBackendError, match="does not fit its memory"):
            window.get(torch.ones(n), after, 3)
        with parallel_raises(dist.DistBackendError, match="does not fit its memory"):
            window.accumulate(torch.ones(n), after, 3)
    dist.barrier()
    window._exposed.withdraw()
    dist.barrier()
    for n in (1, 10_000):
        with parallel_raises(dist.DistBackendError, match="withdrawn"):
            window.put(torch.ones(n), after)
    parallel_assert(not memory.any(), "nothing was written")
    dist.barrier()


def test_an_accumulate_without_an_operation_is_refused(group: Any) -> None:
    """The peer added bytes as if they were numbers of another dtype."""
    _, _, _, after = ring()
    window, memory = window_of(group, 4)
    with parallel_raises(TypeError, match="None is not a reduce operation"):
        window.accumulate(torch.ones(4), after, op=None)
    dist.barrier()
    parallel_assert(memory.tolist() == [0.0] * 4, f"{memory}")


def test_what_was_refused_is_not_kept(group: Any) -> None:
    """The rank receives the data before it refuses them, so MPI is done with them."""
    rank, _, _, after = ring()
    window, _ = window_of(group, 3)
    dist.barrier()
    window._parts[after].numel = 1_000_000
    kept = []
    for _ in range(8):
        tensor = torch.ones(500_000)
        kept.append(weakref.ref(tensor))
        with pytest.raises(dist.DistBackendError, match="does not fit its memory"):
            window.put(tensor, after, 3)
        del tensor
    gc.collect()
    left = [0]

    def gone() -> bool:
        gc.collect()
        left[0] = sum(ref() is not None for ref in kept)
        return left[0] <= 1  # the last one's error may still be referred to

    wait_for(gone)
    parallel_assert(gone(), f"{left} of {len(kept)} are kept")


def test_a_registration_that_one_rank_is_late_for(group: Any) -> None:
    """A request may come before the rank has exposed its memory: it waits."""
    rank, _, _, after = ring()
    first, _ = window_of(group, 1)
    if rank == 1:
        before = type(first)._expose

        def later(self: Any, *about: Any) -> None:
            time.sleep(0.5)
            before(self, *about)

        type(first)._expose = later
    try:
        window, memory = window_of(group, 2)
    finally:
        if rank == 1:
            type(first)._expose = before
    window.put(torch.ones(2), after)
    dist.barrier()
    parallel_assert(memory.tolist() == [1.0, 1.0], f"{memory}")


def test_registered_again_and_again(group: Any) -> None:
    rank, _, before, after = ring()
    window = group.new_window()
    for turn in range(60):
        memory = torch.zeros(1 + turn)
        window.tensor_register(memory, owning=turn % 2 == 0)
        window.put(torch.full((1,), turn + rank + 1.0), after, turn)
        window.signal(after)
        window.wait_signal(before)
        assert memory[turn] == turn + before + 1
        window.tensor_deregister()
    dist.barrier()


def test_requests_have_numbers_of_their_own() -> None:
    """More of them than this MPI has tags."""
    group = dist.new_group()
    rank, _, _, after = ring()
    window, memory = window_of(group, 2, torch.int64)
    count = min(_engine.tags(dist.group.WORLD.carrier), 1_100) + 5
    dist.barrier()
    for _ in range(count):
        window.accumulate(torch.ones(2, dtype=torch.int64), after)
    dist.barrier()
    parallel_assert(memory.tolist() == [count, count], f"{memory} instead of {count}")
    dist.destroy_process_group(group)


def finish(begin: Any, later: bool) -> None:
    begin(async_op=later).wait()


def test_one_element_with_any_stride(group: Any) -> None:
    """torch calls it contiguous, whatever its stride is."""
    rank, _, before, after = ring()
    for form in (
        lambda t: t[::2][:1],
        lambda t: t[:1].expand(1),
        lambda t: t[:3].view(1, 3)[:, 0],
        lambda t: t.as_strided((1,), (0,)),
    ):
        memory = form(torch.zeros(6))
        window = group.new_window(memory)
        window.put(form(torch.full((6,), rank + 1.0)), after)
        dist.barrier()
        window.accumulate(form(torch.full((6,), 10.0)), after)
        out = form(torch.zeros(6)) if memory.stride() != (0,) else torch.zeros(1)
        window.get(out, after)
        assert float(out) == rank + 11
        dist.barrier()
        assert float(memory) == before + 11
        window.tensor_deregister()
    dist.barrier()


def test_memory_made_in_inference_mode(group: Any) -> None:
    rank, _, before, after = ring()
    with torch.inference_mode():
        memory = torch.zeros(3)
        window = group.new_window(memory)
    window.put(torch.full((1,), rank + 1.0), after, 2)
    window.put(torch.full((1,), 5.0), rank, 0)
    dist.barrier()
    parallel_assert(memory.tolist() == [5.0, 0.0, before + 1.0], f"{memory}")


@pytest.mark.parametrize("later", [False, True], ids=["wait", "async"])
def test_handlers_that_raise_leave_no_message_behind(later: bool) -> None:
    """What was begun goes on, or nothing was begun: so the group is destroyed at once."""
    rank, _, _, after = ring()
    group = dist.new_group(timeout=timedelta(seconds=30))
    window, memory = window_of(group, 100_000)
    ones, broken = torch.ones(100_000), 0
    dist.barrier()
    with interrupting() as interrupted:
        for turn in range(200):
            begin = partial(window.put if turn % 2 else window.accumulate, ones, after)
            call = partial(finish, begin, later)
            broken += interrupted(call, 1e-5 * (turn % 60)) is not None
    finish(partial(window.put, torch.full((100_000,), 2.0), after), later)
    dist.barrier()
    parallel_assert(bool((memory == 2).all()), "a later call's data come last")
    parallel_assert(broken > 0, "no handler raised")
    began = time.monotonic()
    dist.destroy_process_group(group)
    parallel_assert(time.monotonic() - began < 15, "what nobody receives was waited for")
