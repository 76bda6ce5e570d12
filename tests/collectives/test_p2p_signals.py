"""A signal handler that raises in a receive loses no message.

The message is in the tensor, or the next receive gets it.
"""

from __future__ import annotations

import signal
import time
from functools import partial
from typing import Any

import numpy as np
import pytest
from breaking import breaking, interrupting
from cases import here

import hpcdist as dist
from hpcdist.testing import parallel_assert

pytestmark = pytest.mark.ranks

#: Whose lines raise.
FILE = "objects_p2p.py"


@pytest.mark.mpi(min_size=2)
def test_a_send_that_has_ended_while_a_handler_ran_is_over() -> None:
    """It was told that the send goes on, and its tensor was kept for ever."""
    rank, _ = here()

    def late(*_: Any) -> None:
        dist.send(np.ones(1), 1, tag=1)  # the receiver may begin
        dist.recv(np.ones(1), 1, tag=2)  # it has all
        time.sleep(0.05)
        raise ZeroDivisionError

    told = ""
    dist.barrier()
    if rank == 0:
        before = signal.signal(signal.SIGALRM, late)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        try:
            dist.send(np.arange(1 << 20), 1)
        except ZeroDivisionError as error:
            told = " ".join(getattr(error, "__notes__", ["the tensor was sent"]))
        finally:
            signal.signal(signal.SIGALRM, before)
    elif rank == 1:
        got = np.zeros(1 << 20, np.int64)
        dist.recv(np.ones(1), 0, tag=1)
        dist.recv(got, 0)
        assert got[-1] == len(got) - 1
        dist.send(np.ones(1), 0, tag=2)
    parallel_assert(rank != 0 or "the tensor was sent" in told, told)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("count", [1, 1000, 1 << 22])
def test_a_message_is_not_lost(count: int) -> None:
    """The message comes 100 ms after the receive began; signals before, then, and after."""
    rank, _ = here()
    wrong = []
    with interrupting() as interrupted:
        for number, delay in enumerate((0.02, 0.06, 0.09, 0.1, 0.101, 0.103, 0.11, 0.15), start=1):
            dist.barrier()
            if rank == 0:
                time.sleep(0.1)
                dist.send(np.full(count, number), 1)
                dist.send(np.full(count, -number), 1)
            elif rank == 1:
                got, after = np.zeros(count, np.int64), np.zeros(count, np.int64)
                error = interrupted(partial(dist.recv, got, 0), delay)
                notes = getattr(error, "__notes__", ["nothing" * (not got.any())])
                if error and "nothing" in " ".join(notes):
                    dist.recv(got, 0)
                dist.recv(after, 0)
                if not (got == number).all() or not (after == -number).all():
                    wrong.append((delay, got[0], after[0]))
    parallel_assert(not wrong, f"{wrong}")


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("side", ["sender", "receiver"])
def test_an_exception_at_each_line_loses_no_objects(side: str) -> None:
    """The objects come once, whole, and before those that are sent after them."""
    rank, at, wrong, goes_on = here()[0], 0, [], np.ones(1)
    while goes_on[0]:
        dist.barrier()
        if rank == 0:
            objects = ["first", at]
            broke = side == "sender" and breaking(
                lambda: dist.send_object_list(objects, 1),  # noqa: B023
                at,
                FILE,
                lambda frame: bool(frame.f_locals.get("works")),
            )
            if side == "receiver":
                dist.send_object_list(objects, 1)
            dist.send_object_list(["second", at], 1)
        elif rank == 1:
            got: list[Any] = [None, None]
            broke = side == "receiver" and breaking(
                lambda: dist.recv_object_list(got, 0 if at % 2 else None),  # noqa: B023
                at,
                FILE,
            )
            if got[0] is None:
                dist.recv_object_list(got, 0 if at % 3 else None)
            after: list[Any] = [None, None]
            dist.recv_object_list(after, 0)
            if got != ["first", at] or after != ["second", at]:
                wrong.append((at, got, after))
        goes_on[0] = broke if rank == (side == "receiver") else 0
        dist.all_reduce(goes_on)
        at += 1
    parallel_assert(not wrong, f"{wrong}")
    parallel_assert(at > 3, f"only {at} lines")
