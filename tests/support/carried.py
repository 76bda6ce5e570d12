"""What holds of data that travel with the entry check, short or long."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
from cases import FLOATS, Check, here, poison
from forms import MOVES
from lateness import hear, interrupted_call, once_others_have_ended, tell

import hpcdist as dist
from hpcdist.backends.mpi import LEVELS
from hpcdist.testing import parallel_raises


def infinities_and_nans(group: dist.ProcessGroup, sizes: Sequence[int]) -> None:
    """Reduce what is no ordinary number."""
    check, (rank, size) = Check(), here()
    for dtype in FLOATS:
        for n in sizes:
            mine = torch.full((n,), float("inf") if rank == 0 else 1.0, dtype=dtype)
            dist.all_reduce(mine, group=group)
            check.that(bool(mine.isposinf().all()), f"inf {dtype} n={n}: {mine}")
            mine = torch.full((n * size,), float("nan") if rank == size - 1 else 1.0, dtype=dtype)
            out = poison(dtype, n)
            dist.reduce_scatter_tensor(out, mine, dist.ReduceOp.MAX, group)
            check.that(bool(out.isnan().all()), f"nan {dtype} n={n}: {out}")
            check.everywhere(out, f"nan {dtype} n={n}")
    check.done()


def sums_in_the_order_of_doubling(rng, group: dist.ProcessGroup, sizes: Sequence[int]) -> None:
    """Add bit for bit as by recursive doubling, on every rank."""
    check, (rank, size) = Check(), here()
    core = 1 << (size.bit_length() - 1)
    for n in sizes:
        parts = [torch.from_numpy(rng.standard_normal(n)).float() for _ in range(size)]
        mine = parts[rank].clone()
        dist.all_reduce(mine, group=group)
        sums = [parts[r] + parts[r + core] if r + core < size else parts[r] for r in range(core)]
        while len(sums) > 1:
            sums = [one + other for one, other in zip(sums[::2], sums[1::2], strict=True)]
        check.equal(mine, sums[0], f"n={n}")
    check.done()


def outputs_that_late_ranks_leave(
    rng, group: dist.ProcessGroup, n: int, late: Iterable[int]
) -> None:
    """Give calls up that one rank begins too late: no tensor changes, and all can try again."""
    check, (_, size) = Check(), here()
    calls = (
        lambda out, mine: dist.all_gather_into_tensor(out, mine, group=group),
        lambda out, mine: dist.all_reduce(out, group=group),
        lambda out, mine: dist.all_to_all_single(out, out.clone(), group=group),
        lambda out, mine: dist.broadcast(mine, size - 1, group=group),
        lambda out, mine: dist.reduce_scatter_tensor(mine, out, group=group),
    )
    for one in late:
        for i, call in enumerate(calls):
            group.carrier.timeout = 0.3
            out, mine = poison(torch.int64, n * size), poison(torch.int64, n)
            with parallel_raises(dist.DistTimeoutError), once_others_have_ended(one):
                call(out, mine)
            check.equal(out, poison(torch.int64, n * size), f"call {i}: output")
            check.equal(mine, poison(torch.int64, n), f"call {i}: input")
            group.carrier.timeout = 20
            for form in MOVES[:2]:
                form(rng, check, torch.int64, n, False, group=group)
    check.done()


def calls_that_a_handler_ends(group: dist.ProcessGroup, n: int) -> None:
    """Raise in a call that the next rank begins only once the handler has raised.

    At level fast that rank may not have heard of it yet, and then the group is over.
    """
    check, (rank, size) = Check(), here()
    went: list[bool] = [False] * size
    for raising in range(size):
        late = (raising + 1) % size
        tensor = torch.full((n,), rank)
        error: BaseException | None = None
        if rank == late:
            hear(raising)
        try:
            with interrupted_call(group) if rank == raising else nullcontext():
                dist.all_reduce(tensor, group=group)
        except (KeyboardInterrupt, dist.DistError) as raised:
            error = raised
        if rank == raising:
            tell(late)
        dist.all_gather_object(went, error is None)
        if any(went) and group.carrier.check == LEVELS["fast"]:
            right = sum(range(size)) if error is None else rank
            check.that(bool((tensor == right).all()), f"rank {raising} raised: {tensor}")
            with parallel_raises(dist.DistTimeoutError, match="other ranks have gone on"):
                dist.all_reduce(tensor, group=group)
            check.done()
            return
        wanted = KeyboardInterrupt if rank == raising else dist.DistTimeoutError
        check.that(type(error) is wanted, f"rank {raising} raised: {error!r}")
        check.that(bool((tensor == rank).all()), "the tensor changed")
    total = torch.ones(n)
    dist.all_reduce(total, group=group)
    check.that(bool((total == size).all()), "the next sum")
    check.done()


@contextmanager
def stopped_anywhere() -> Iterator[None]:
    """Stop the last rank for 10 ms, again and again."""
    rank, size = here()
    if rank != size - 1:
        yield
        return
    me = os.getpid()
    script = "while kill -STOP $0 && sleep 0.01 && kill -CONT $0; do sleep 0.02; done"
    stopper = subprocess.Popen(["sh", "-c", script, str(me)])
    try:
        yield
    finally:
        stopper.kill()
        stopper.wait()
        os.kill(me, signal.SIGCONT)
