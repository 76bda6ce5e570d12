"""One rank alone fails while the ranks make their groups again; see tests/support/failing.py.

All of them get the same error, and no communicator that another rank has made is left. NumPy's
arrays do: a job without torch starts in a fourth of the time.
"""

from __future__ import annotations

import ctypes
import faulthandler
from collections.abc import Callable
from datetime import timedelta

import numpy as np

import hpcdist as dist
from hpcdist import _engine
from hpcdist.groups.world import world


def number(name: str) -> ctypes.c_int:
    """Return a number of the library."""
    return ctypes.c_int.in_dll(ctypes.CDLL(None), name)


def failing(name: str, call: Callable[[], object], text: str) -> None:
    """Make a call in which rank 1 fails as the library does under that name."""
    flag = number(name)
    flag.value = dist.get_rank() == 1
    try:
        call()
    except dist.DistBackendError as error:
        assert text in str(error), error
    else:
        raise AssertionError(f"{name}: no error")
    finally:
        flag.value = 0


def main() -> None:
    faulthandler.dump_traceback_later(100, exit=True)
    dist.init_process_group(timeout=timedelta(seconds=20))
    whole = world.comm.native
    ranks = tuple(range(dist.get_world_size()))
    again = [whole, ranks, "again", 20.0, 1, []]
    failing("no_memory", lambda: _engine.exchange(whole, b"mine"), "could not tell each other")
    failing("no_memory", lambda: _engine.remake(*again), "has no memory to make groups")
    failing("no_split", lambda: _engine.remake(*again), "MPI_Comm_split failed")
    assert number("freed").value == (dist.get_rank() != 1), number("freed")
    assert _engine.exchange(whole, b"mine") == [b"mine"] * len(ranks)
    made = again[-1]
    assert not made and _engine.remake(*again) and made[0].size == len(ranks)
    total = np.ones(1)
    made[0].all_reduce(total)
    assert total == len(ranks), total
    made[0].free(5.0)
    print("ended", flush=True)
    dist.destroy_process_group()


main()
