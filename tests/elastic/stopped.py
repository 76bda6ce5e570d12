"""Ranks stop for ever (SIGSTOP), one after the other, and each time the others go on without it."""

from __future__ import annotations

import faulthandler
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import numpy as np

import hpcdist as dist
from hpcdist.groups.reconfigure import agree

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from patience import at_most  # noqa: E402

TIMEOUT = 2.0
CASES = sys.argv[1:]
NODES = bool(os.environ.get("HPCDIST_NODES"))


def reduce(last: int) -> None:
    dist.all_reduce(np.ones(5))


def reduce_much(last: int) -> None:
    """Stop in the middle of some call: in its check, or while it moves data."""
    if dist.get_rank() == last:
        stop_soon(0.1 + 0.05 * random.random())
    for _ in range(100_000):
        dist.all_reduce(np.ones(300_000, np.float32))


def receive(last: int) -> None:
    if dist.get_rank() == 0:
        dist.recv(np.ones(5), last)
    else:
        dist.barrier()


def receive_any(last: int) -> None:
    """Two ranks: nobody but the one that is stopped could send."""
    dist.recv(np.ones(5))


def vote(last: int) -> None:
    """End: the agreement of the ranks that live does; then their next call tells them."""
    assert agree(1) == 1
    dist.barrier()


def make_group(last: int) -> None:
    dist.new_group(list(range(dist.get_world_size())))


def asynchronous(last: int) -> None:
    works = [dist.all_reduce(np.ones(3), async_op=True) for _ in range(3)]
    for work in works:
        work.wait()


def stop_soon(seconds: float) -> None:
    """Let another process stop this one, at any instruction."""
    if os.fork() == 0:
        time.sleep(seconds)
        os.kill(os.getppid(), signal.SIGSTOP)
        os._exit(0)


def lose_the_last(call: Callable[[int], None]) -> None:
    last = dist.get_world_size() - 1
    dist.barrier()
    if dist.get_rank() == last and call is not reduce_much:
        os.kill(os.getpid(), signal.SIGSTOP)
    began = time.monotonic()
    try:
        call(last)
    except dist.RankFailedError as error:
        seconds = time.monotonic() - began
        # MPI may not have told yet who it was, on another node
        assert error.ranks == (last,) or (NODES and not error.ranks), error
        assert TIMEOUT - 0.3 < seconds < TIMEOUT + at_most(1.5) or call is reduce_much, seconds
    else:
        raise AssertionError(f"{call.__name__} has not failed")
    result = dist.group.WORLD.reconfigure()
    assert result.lost == (last,), result
    ones = np.ones(4)
    dist.all_reduce(ones)
    assert ones.tolist() == [last] * 4
    if dist.get_rank() == 0:
        print(f"{call.__name__}: {last} left", flush=True)


faulthandler.dump_traceback_later(90, exit=True)
dist.init_process_group(timeout=timedelta(seconds=40))
dist.group.WORLD.set_timeout(timedelta(seconds=TIMEOUT))
for case in CASES:
    lose_the_last(globals()[case])
dist.destroy_process_group()
