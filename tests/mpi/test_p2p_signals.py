"""A signal handler that raises in a receive loses no message.

The message is in the tensor, or the next receive gets it.
"""

from __future__ import annotations

import signal
import time

import numpy as np
import pytest
from cases import here

import hpcdist as dist
from hpcdist.testing import parallel_assert


class Stop(Exception):
    """What the handler raises."""


def stop(*_: object) -> None:
    raise Stop


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("count", [1, 1000, 1 << 22])
def test_a_message_is_not_lost(count: int) -> None:
    """The message comes 100 ms after the receive began; signals before, then, and after."""
    rank, _ = here()
    wrong = []
    if rank == 1:
        before = signal.signal(signal.SIGALRM, stop)
    for number, delay in enumerate((0.02, 0.06, 0.09, 0.1, 0.101, 0.103, 0.11, 0.15), start=1):
        dist.barrier()
        if rank == 0:
            time.sleep(0.1)
            dist.send(np.full(count, number), 1)
            dist.send(np.full(count, -number), 1)
        elif rank == 1:
            got = np.zeros(count, np.int64)
            try:
                signal.setitimer(signal.ITIMER_REAL, delay)
                dist.recv(got, 0)
                signal.setitimer(signal.ITIMER_REAL, 0)
            except Stop as error:
                said = " ".join(getattr(error, "__notes__", ["nothing" * (not got.any())]))
                if "nothing" in said:
                    dist.recv(got, 0)
            after = np.zeros(count, np.int64)
            dist.recv(after, 0)
            if not (got == number).all() or not (after == -number).all():
                wrong.append((delay, got[0], after[0]))
    if rank == 1:
        signal.signal(signal.SIGALRM, before)
    parallel_assert(not wrong, f"{wrong}")
