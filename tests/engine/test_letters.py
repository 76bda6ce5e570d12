"""Letters of several messages: 4 to 32 KiB of data that travel with the check between nodes."""

import os
import random
import signal
import subprocess
import threading
import time
from contextlib import contextmanager, nullcontext

import pytest
import torch
from cases import FLOATS, MOVED, Check, here, pairs, poison
from forms import MOVES, REDUCTIONS
from worlds import LAYOUTS, SHORT, between_nodes, layouts, start_with, true_place

import hpcdist as dist
from hpcdist.testing import parallel_assert, parallel_raises

pytestmark = [pytest.mark.ranks, pytest.mark.mpi(min_size=2)]

#: Bytes of a message and of the longest letters of all operations, between two nodes.
MESSAGE, LIMITS = 3968, (3840, 4 << 10, 8 << 10, 16 << 10, 32 << 10)


@pytest.fixture(params=["apiece", *range(len(LAYOUTS))], ids=["apiece", *LAYOUTS])
def group(request, no_world, monkeypatch):
    """Ranks on nodes of their own, or on two nodes."""
    size = true_place()[1]
    if request.param == "apiece":
        dist.init_process_group(timeout=SHORT)
        made = between_nodes(SHORT)
    else:
        said = start_with(monkeypatch, HPCDIST_NODES=layouts(size)[request.param])
        parallel_assert(said == "", said)
        made = dist.new_group(timeout=SHORT)
    parallel_assert("MPI" in made.carrier.checks_through, made.carrier.checks_through)
    yield made
    dist.destroy_process_group()


def lengths(rng, itemsize: int) -> list[int]:
    """Elements on both sides of a limit: where they are the whole letter, and a part of one."""
    size = here()[1]
    limit = int(rng.choice([*LIMITS, 2 * MESSAGE, 4 * MESSAGE]))
    others = int(rng.integers(1, size))
    at = limit // others // itemsize // int(rng.choice([1, size, size**2]))
    return [max(1, at - int(rng.integers(0, 40))), max(1, at), at + 1]


@pytest.mark.parametrize("form", MOVES, ids=lambda form: form.__name__)
def test_moves_around_the_limits(rng, group, form):
    check = Check()
    for dtype in rng.permutation(len(MOVED))[:6]:
        for n in lengths(rng, MOVED[dtype].itemsize):
            form(rng, check, MOVED[dtype], n, bool(rng.integers(2)), group)
    check.done()


@pytest.mark.parametrize("form", REDUCTIONS, ids=lambda form: form.__name__)
def test_reductions_around_the_limits(rng, group, form):
    check, every = Check(), pairs()
    for at in rng.permutation(len(every))[:12]:
        name, _, dtype = every[at]
        for n in lengths(rng, dtype.itemsize):
            form(rng, check, name, dtype, n, bool(rng.integers(2)), group)
    check.done()


def test_each_rank_has_the_sum_of_doubling(rng, no_world):
    """A long letter changes no bit."""
    dist.init_process_group(timeout=SHORT)
    group = between_nodes(SHORT)
    check, (rank, size) = Check(), here()
    core = 1 << (size.bit_length() - 1)
    for n in (MESSAGE // 4, MESSAGE // 2, (16 << 10) // 4 // (size - 1)):
        parts = [torch.from_numpy(rng.standard_normal(n)).float() for _ in range(size)]
        mine = parts[rank].clone()
        dist.all_reduce(mine, group=group)
        sums = [parts[r] + parts[r + core] if r + core < size else parts[r] for r in range(core)]
        while len(sums) > 1:
            sums = [one + other for one, other in zip(sums[::2], sums[1::2], strict=True)]
        check.equal(mine, sums[0], f"n={n}")
    check.done()
    dist.destroy_process_group()


def test_infinities_and_nans(group):
    check, (rank, size) = Check(), here()
    for dtype in FLOATS:
        for n in (1000, 2000):
            mine = torch.full((n,), float("inf") if rank == 0 else 1.0, dtype=dtype)
            dist.all_reduce(mine, group=group)
            check.that(bool(mine.isposinf().all()), f"inf {dtype} n={n}")
            mine = torch.full((n * size,), float("nan") if rank == size - 1 else 1.0, dtype=dtype)
            out = poison(dtype, n)
            dist.reduce_scatter_tensor(out, mine, dist.ReduceOp.MAX, group)
            check.that(bool(out.isnan().all()), f"nan {dtype} n={n}")
            check.everywhere(out, f"nan {dtype} n={n}")
    check.done()


def test_a_late_rank_leaves_outputs_untouched_and_all_can_retry(rng, group):
    """It begins its call once all others have told it that they have given up theirs."""
    check, (rank, size) = Check(), here()
    n, word = 1000, torch.zeros(1)
    calls = (
        lambda out, mine: dist.all_gather_into_tensor(out, mine, group=group),
        lambda out, mine: dist.all_reduce(out, group=group),
        lambda out, mine: dist.broadcast(mine, size - 1, group=group),
        lambda out, mine: dist.reduce_scatter_tensor(mine, out, group=group),
    )
    for late in {0, size - 1}:
        for i, call in enumerate(calls):
            group.carrier.timeout = 0.3
            out, mine = poison(torch.int64, n * size), poison(torch.int64, n)
            with parallel_raises(dist.DistTimeoutError):
                for other in set(range(size)) - {late} if rank == late else ():
                    dist.recv(word, other)
                try:
                    call(out, mine)
                finally:
                    if rank != late:
                        dist.send(word, late)
            check.equal(out, poison(torch.int64, n * size), f"call {i}: output")
            check.equal(mine, poison(torch.int64, n), f"call {i}: input")
            group.carrier.timeout = 20
            for form in MOVES[:2]:
                form(rng, check, torch.int64, n, False, group=group)
    check.done()


def test_a_rank_that_refuses_or_calls_something_else(rng, group):
    check, (rank, size) = Check(), here()
    for n in (1000, 1500, 2000):
        tensor = torch.full((n + (rank == size - 1),), rank)
        before = tensor.clone()
        with parallel_raises(dist.DistMismatchError):
            dist.all_reduce(tensor, group=group)
        check.equal(tensor, before, f"n={n}")
        with parallel_raises(Exception):
            dist.broadcast(tensor if rank else "no tensor", 0, group=group)
        check.equal(tensor, before, f"n={n}, refused")
        for form in REDUCTIONS[:1]:
            form(rng, check, "SUM", torch.int64, n, False, group=group)
    check.done()


@contextmanager
def interrupted_call(group):
    """Let a handler raise KeyboardInterrupt in this thread once it has begun a call of `group`."""

    def handler(number, frame):
        raise KeyboardInterrupt

    def interrupt():
        while group.carrier.seq == calls and not over.wait(1e-3):
            pass
        if not over.is_set():
            signal.pthread_kill(main, signal.SIGALRM)

    calls, over, main = group.carrier.seq, threading.Event(), threading.get_ident()
    before = signal.signal(signal.SIGALRM, handler)
    helper = threading.Thread(target=interrupt)
    helper.start()
    try:
        yield
    finally:
        over.set()
        helper.join()
        signal.signal(signal.SIGALRM, before)


def test_a_signal_handler_that_raises(group):
    """In a call that the next rank begins only once the handler has raised."""
    check, (rank, size) = Check(), here()
    word = torch.zeros(1)
    for raising in range(size):
        late = (raising + 1) % size
        tensor = torch.full((1500,), rank)
        error: type | None = None
        if rank == late:
            dist.recv(word, raising)
        try:
            with interrupted_call(group) if rank == raising else nullcontext():
                dist.all_reduce(tensor, group=group)
        except BaseException as raised:
            error = type(raised)
        if rank == raising:
            dist.send(word, late)
            check.that(error is KeyboardInterrupt, f"the rank that raises: {error}")
        else:
            check.that(error is not None and issubclass(error, dist.DistError), f"others: {error}")
        check.that(bool((tensor == rank).all()), "the tensor changed")
    total = torch.ones(1500)
    dist.all_reduce(total, group=group)
    check.that(bool((total == size).all()), "the next sum")
    check.done()


def test_ranks_that_are_stopped_anywhere(rng, group):
    check, (rank, size) = Check(), here()
    script = "while kill -STOP $0 && sleep 0.01 && kill -CONT $0; do sleep 0.02; done"
    me = os.getpid()
    stopper = subprocess.Popen(["sh", "-c", script, str(me)]) if rank == size - 1 else None
    try:
        for turn in range(4):
            for form in MOVES[:2]:
                form(rng, check, torch.int32, 500 * (turn + 1), turn % 2 == 1, group=group)
            for form in REDUCTIONS[::2]:
                form(rng, check, "SUM", torch.int32, 700 * (turn + 1), turn % 2 == 1, group=group)
    finally:
        if stopper:
            stopper.kill()
            stopper.wait()
            os.kill(me, signal.SIGCONT)
    check.done()


def test_no_mixed_outcomes_when_ranks_give_up_at_random(group):
    """Late ranks and a short timeout: all have the right result, or all have an error.

    The timeout, 2 ms at first, grows until a call has succeeded on this machine.
    """
    check, (rank, size) = Check(), here()
    patience, good = 0.002, 0
    luck = random.Random(rank)
    for number in range(80):
        group.carrier.timeout = patience
        time.sleep(luck.choice((0.0, 0.0, 0.0, 2 * patience * luck.random())))
        n = (480, 1000, 2000, 4000)[number % 4]
        tensor = torch.full((n,), rank + number)
        try:
            dist.all_reduce(tensor, group=group)
            result = int(bool((tensor == sum(range(size)) + number * size).all()))
        except dist.DistTimeoutError:
            result = -1 if bool((tensor == rank + number).all()) else -2
        outcomes: list[int] = [0] * size
        dist.all_gather_object(outcomes, result)
        check.that(set(outcomes) in ({1}, {-1}), f"check {number}: {outcomes}")
        good += set(outcomes) == {1}
        if not good:
            patience = min(1.3 * patience, 1.0)
    check.that(good > 0, "no call succeeded")
    group.carrier.timeout = 20.0
    check.done()
