"""What goes wrong with CUDA tensors over MPI: typed errors on all ranks, in time, and all go on."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import standin
import torch
from long_form import LONG
from long_form import size as how_many
from over_mpi import CHUNK, copies, empty, start
from patience import hasty_group
from standin import cpu, gpu

import hpcdist as dist
from hpcdist.testing import parallel_assert

pytestmark = [pytest.mark.standin, pytest.mark.usefixtures("over_mpi"), pytest.mark.mpi(min_size=2)]

#: What an error may take beyond its timeout; the ranks of CI share two cores with other jobs.
SLACK = 1.0 if LONG else 5.0
#: Elements of eight buffers.
N = 8 * CHUNK // 4
VICTIM = 1

BROKEN = "CUDA error: an illegal memory access"
TOLD = (
    rf"on rank \d+ ended in the middle, because rank {VICTIM} could not go on: RuntimeError: CUDA"
)


def ones(n: int = N) -> torch.Tensor:
    return gpu(torch.ones(n))


#: Each operation that goes through the pinned buffers in another way, with what it is given.
OPERATIONS: dict[str, Callable[[bool], Any]] = {
    "all_reduce": lambda later: dist.all_reduce(ones(), async_op=later),
    "broadcast": lambda later: dist.broadcast(ones(), VICTIM, async_op=later),
    "broadcast to it": lambda later: dist.broadcast(ones(), 0, async_op=later),
    "all_gather_into_tensor": lambda later: dist.all_gather_into_tensor(
        empty(N * dist.get_world_size(), torch.float32), ones(), async_op=later
    ),
    "reduce_scatter_tensor": lambda later: dist.reduce_scatter_tensor(
        empty(N, torch.float32), ones(N * dist.get_world_size()), async_op=later
    ),
    "all_to_all_single": lambda later: dist.all_to_all_single(
        empty(N * dist.get_world_size(), torch.float32),
        ones(N * dist.get_world_size()),
        async_op=later,
    ),
    "gather": lambda later: dist.gather(
        ones(),
        [empty(N, torch.float32) for _ in range(dist.get_world_size())] * (dist.get_rank() == 0)
        or None,
        0,
        async_op=later,
    ),
}


def tried(call: Callable[[], Any]) -> tuple[float, BaseException | None]:
    """Seconds that a call took with its ``wait()``, and what it raised."""
    began = time.monotonic()
    try:
        work = call()
        if work is not None:
            work.wait()
    except (RuntimeError, KeyboardInterrupt) as error:
        return time.monotonic() - began, error
    return time.monotonic() - began, None


def all_is_well() -> bool:
    """Whether the ranks still compute together, as often as they like."""
    good = True
    for n in (5, 3000):
        data = ones(n)
        dist.all_reduce(data)
        good &= bool((cpu(data) == dist.get_world_size()).all())
    return good


def text_of(error: BaseException | None) -> str:
    return f"{type(error).__name__}: {error}"


@contextmanager
def pressed(seconds: float) -> Iterator[None]:
    """Ctrl-C after a while, by a signal of our own: pytest's would end it if it came late."""

    def press(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, press)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("later", [False, True], ids=["sync", "async"])
def test_a_copy_that_fails(runtime, later, count):
    victim, wrong, slowest, cases = dist.get_rank() == VICTIM, [], 0.0, 0
    for number, name in enumerate(OPERATIONS):
        for fails in (1, 3 + number):
            with copies(runtime, fails if victim else 0):
                taken, error = tried(lambda name=name: OPERATIONS[name](later))
            wanted = f"RuntimeError: {BROKEN}" if victim else f"DistBackendError: .*{TOLD}"
            # far from the group's timeout of 20 s: nobody waits for who has failed
            if not re.match(wanted, text_of(error), re.DOTALL) or taken > SLACK:
                wrong.append((name, fails, taken, text_of(error)))
            slowest, cases = max(slowest, taken), cases + 1
        if not all_is_well():
            wrong.append((name, "afterwards"))
    parallel_assert(not wrong, lambda: str(wrong))
    count(cases, slowest)


@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt])
def test_buffers_that_cannot_be_made(runtime, monkeypatch, kind):
    victim, wrong = dist.get_rank() == VICTIM, []

    def fail(size: int) -> None:
        raise kind("CUDA error: out of memory")

    for name in ("all_reduce", "gather"):
        with monkeypatch.context() as patch, standin.on(standin.Stream()):  # it has none yet
            if victim:
                patch.setattr(runtime, "pinned", fail)
            taken, error = tried(lambda name=name: OPERATIONS[name](False))
        if victim:
            good = type(error) is kind
        else:
            wanted = f"because rank {VICTIM} could not go on: {kind.__name__}"
            good = isinstance(error, dist.DistBackendError) and wanted in str(error)
        if not good or taken > SLACK or not all_is_well():
            wrong.append((name, taken, text_of(error)))
    parallel_assert(not wrong, lambda: str(wrong))


@pytest.mark.mpi(min_size=3)
def test_copies_of_two_ranks_that_fail_alike(runtime):
    """A third rank that comes later is told of both, and of the cause."""
    rank = dist.get_rank()

    def late(number: int) -> None:
        if number == 2:
            time.sleep(0.3)

    with copies(runtime, 2 if rank in (1, 2) else 0, on_copy=late if rank == 0 else None):
        taken, error = tried(lambda: OPERATIONS["all_reduce"](False))
    wanted = "DistBackendError: .*because ranks 1, 2 could not go on: RuntimeError: CUDA"
    refusal = getattr(error, "refusal", None)
    if rank in (1, 2):
        good = text_of(error).startswith(f"RuntimeError: {BROKEN}")
    elif rank == 0:
        good = bool(re.match(wanted, text_of(error), re.DOTALL)) and refusal.ranks == (1, 2)
    else:
        good = refusal is not None and set(refusal.ranks) <= {1, 2}
    parallel_assert(good and taken < SLACK, lambda: f"{taken:.2f} s, {text_of(error)}")
    parallel_assert(all_is_well())


def test_the_last_copy_that_fails_is_one_ranks_own_affair(runtime):
    victim = dist.get_rank() == VICTIM
    with copies(runtime, 16 if victim else 0):
        _, error = tried(lambda: OPERATIONS["all_reduce"](False))
    parallel_assert((BROKEN in str(error)) if victim else error is None, lambda: text_of(error))
    parallel_assert(all_is_well())


def test_ctrl_c(runtime):
    rank, size = dist.get_rank(), dist.get_world_size()

    def stop(number: int) -> None:
        if number == 7:
            raise KeyboardInterrupt

    # between two pieces
    with copies(runtime, on_copy=stop if rank == VICTIM else None):
        taken, error = tried(lambda: OPERATIONS["all_reduce"](False))
    wanted = "KeyboardInterrupt" if rank == VICTIM else "DistBackendError: .*KeyboardInterrupt"
    parallel_assert(
        bool(re.match(wanted, text_of(error), re.DOTALL)) and taken < SLACK,
        lambda: f"{taken:.2f} s {text_of(error)}",
    )
    # while a rank is not there yet; behind what is on the caller's stream; in wait() and recv
    host, got = dist.new_group(list(range(size))), []
    if rank == VICTIM:
        stream = standin.Stream()
        work = dist.all_reduce(data := ones(), async_op=True)
        with standin.on(stream):
            stream.kernel(1.0)
            calls = (
                lambda: dist.recv(empty(9, torch.float32), 0),
                work.wait,
                lambda: dist.recv(empty(N, torch.float32), 0),
            )
            for call in calls:
                with pressed(0.2):
                    began = time.monotonic()
                    try:
                        call()
                    except KeyboardInterrupt:
                        got.append(time.monotonic() - began < 0.2 + SLACK)
    dist.barrier(group=host)
    good = True
    if rank == VICTIM:
        for n in (9, N):  # nobody took them away
            dist.recv(out := empty(n, torch.float32), 0)
            good &= bool((cpu(out) == n).all())
        work.wait()  # it has gone on
    else:
        for n in (9, N) * (rank == 0):
            dist.send(gpu(torch.full((n,), float(n))), VICTIM)
        dist.all_reduce(data := ones())
    good &= bool((cpu(data) == size).all())
    parallel_assert(good and (rank != VICTIM or got == [True] * 3), lambda: str(got))
    parallel_assert(all_is_well())
    dist.destroy_process_group(host)


def test_a_rank_that_never_comes_and_a_stream_that_never_ends(runtime):
    rank, limit = dist.get_rank(), 0.3
    patient = dist.new_group(list(range(dist.get_world_size())), timeout=timedelta(seconds=50))
    dist.all_reduce(ones(5))
    dist.group.WORLD.carrier.timeout = limit
    wrong = []
    for name, later in (("all_reduce", False), ("all_to_all_single", True)):
        if rank != VICTIM:
            taken, error = tried(lambda name=name, later=later: OPERATIONS[name](later))
            wanted = rf"{name} .*rank {VICTIM} has not joined"
            if not isinstance(error, dist.DistTimeoutError) or taken > limit + SLACK:
                wrong.append((name, taken, text_of(error)))
            elif not re.search(wanted, str(error), re.DOTALL):
                wrong.append((name, text_of(error)))
        dist.barrier(group=patient)
    # messages that nobody sends
    if rank == 0:
        for call in (lambda: dist.irecv(empty(9, torch.float32), VICTIM),
                     lambda: dist.recv(empty(N, torch.float32))):  # fmt: skip
            taken, error = tried(call)
            if not isinstance(error, dist.DistTimeoutError) or taken > limit + SLACK:
                wrong.append(("message", taken, text_of(error)))
    dist.barrier(group=patient)
    start()
    dist.all_reduce(ones(5))
    dist.group.WORLD.carrier.timeout = limit
    stream = standin.Stream()
    with standin.on(stream):
        if rank == VICTIM:
            stream.kernel(2.5 * limit)
        taken, error = tried(lambda: OPERATIONS["all_reduce"](False))
        stream.synchronize()
    # who waits hears it from the other one, or its own time is over
    types = dist.DistTimeoutError if rank == VICTIM else (dist.DistBackendError, TimeoutError)
    if not isinstance(error, types) or taken > limit + SLACK:
        wrong.append(("stream", taken, text_of(error)))
    if rank == VICTIM and "in the stream before" not in str(error):
        wrong.append(text_of(error))
    dist.group.WORLD.carrier.timeout = 20.0
    dist.barrier()
    good = all_is_well()
    parallel_assert(not wrong and good, lambda: str(wrong))


def test_messages_that_break_off(runtime):
    rank, wrong = dist.get_rank(), []
    for n in (9, N):  # one piece, and many
        with copies(runtime, (1 if n == 9 else 3) if rank == VICTIM else 0):
            if rank == VICTIM:
                taken, error = tried(lambda n=n: dist.isend(ones(n), 0))
                wanted = f"RuntimeError: {BROKEN}"
            elif rank == 0:
                taken, error = tried(lambda n=n: dist.irecv(empty(n, torch.float32), VICTIM))
                wanted = (
                    "DistMismatchError: rank 1 sent 0 elements of float32"
                    if n == 9
                    else "DistBackendError: rank 1 could not send the rest of a message"
                )
        if rank < 2 and (not re.match(wanted, text_of(error)) or taken > SLACK):
            wrong.append((n, taken, text_of(error)))
        # the receiver's copy fails: the sender gets rid of its message, and the next one is right
        with copies(runtime, (1 if n == 9 else 2) if rank == 0 else 0):
            if rank == VICTIM:
                dist.send(ones(n), 0)
            elif rank == 0:
                taken, error = tried(lambda n=n: dist.irecv(empty(n, torch.float32), VICTIM))
                if BROKEN not in str(error):
                    wrong.append((n, "receiver", text_of(error)))
        if rank == VICTIM:
            dist.send(gpu(torch.full((n,), 7.0)), 0)
        elif rank == 0:
            dist.recv(out := empty(n, torch.float32), VICTIM)
            if not bool((cpu(out) == 7).all()):
                wrong.append((n, "the next one"))
    parallel_assert(not wrong and all_is_well(), lambda: str(wrong))


def _in_the_child(work: Any, pipe: int) -> None:
    """Tell the parent how many calls said why they cannot be, and end."""
    told = 0
    try:
        for call in (
            lambda: dist.all_reduce(ones()),
            lambda: dist.all_reduce(ones(), async_op=True).wait(),
            lambda: dist.send(ones(), 1 - min(dist.get_rank(), 1)),
            lambda: dist.irecv(ones(), 0).wait(),
            lambda: dist.broadcast(ones(), 0),
            work.wait,
            work.is_completed,
            work.get_future,
        ):
            try:
                call()
            except dist.DistError as error:
                told += "fork" in str(error)
        dist.destroy_process_group()  # there is nothing that it could free
    except BaseException:
        traceback.print_exc()
    finally:
        os.write(pipe, bytes([told]))
        os._exit(0)


def test_a_forked_child_is_told():
    work = dist.all_reduce(data := ones(), async_op=True)  # its thread is not in the child
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        _in_the_child(work, theirs)
    os.close(theirs)
    killer = threading.Timer(20.0, os.kill, (child, signal.SIGKILL))
    killer.start()
    answer = os.read(ours, 1)
    status = os.waitpid(child, 0)[1]
    killer.cancel()
    os.close(ours)
    work.wait()
    parallel_assert(
        answer == b"\x08" and status == 0 and bool((cpu(data) == dist.get_world_size()).all()),
        lambda: f"{answer!r}, status {status}",
    )


def test_destroyed_while_a_rank_does_not_come():
    rank = dist.get_rank()
    group = hasty_group(0.5)
    dist.all_reduce(ones(5), group=group)
    work = dist.all_reduce(ones(), group=group, async_op=True) if rank != VICTIM else None
    began, error = time.monotonic(), None
    try:
        dist.destroy_process_group(group)
    except dist.DistError as problem:
        error = problem
    taken = time.monotonic() - began
    late = tried(lambda: work)[1] if rank != VICTIM else None
    good = error is None or isinstance(error, dist.DistTimeoutError)
    good &= taken < 2 * 0.5 + SLACK and (rank == VICTIM or isinstance(late, dist.DistError))
    parallel_assert(good, lambda: f"{taken:.1f} s, {text_of(error)}, {text_of(late)}")
    parallel_assert(all_is_well())


@pytest.mark.deadline(600 if LONG else 60)
def test_beyond_two_to_the_31(monkeypatch):
    """int8: a message, broadcast, all_reduce. With 2 ranks the long form has 2^31 + 17 elements."""
    rank, size = dist.get_rank(), dist.get_world_size()
    n = how_many(2**20 + 17, 2**31 + 17 if size == 2 else 2**24 + 17)
    monkeypatch.delenv("HPCDIST_CUDA_CHUNK")
    marks = [0, 1, 4095, n // 2, n - 4097, n - 2, n - 1]
    data = torch.zeros(n, dtype=torch.int8).as_subclass(standin.FakeCuda)

    def right(factor: int, what: str) -> None:
        found = cpu_view(data)
        got = found[marks].tolist()
        others = int(torch.count_nonzero(found)) - len(marks)
        wanted = [factor * (i + 1) for i in range(len(marks))]
        parallel_assert(got == wanted and not others, lambda: f"{what}: {got}, {others} others")

    if rank == 0:
        cpu_view(data)[marks] = torch.arange(1, len(marks) + 1, dtype=torch.int8)
        dist.send(data, 1)
    elif rank == 1:
        dist.recv(data, 0)
    if rank < 2:
        right_here = cpu_view(data)[marks].tolist() == list(range(1, len(marks) + 1))
    parallel_assert(rank > 1 or right_here)
    dist.broadcast(data, 1)
    right(1, "broadcast")
    dist.all_reduce(data)
    right(size, "all_reduce")


def cpu_view(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, when the current stream is done."""
    standin.Runtime.current(0).synchronize()
    return tensor.as_subclass(torch.Tensor)
