"""Frees groups that the program has dropped without destroy_process_group().

A group whose last reference has gone is noted here, at whatever moment and in whatever thread that
is. The next :func:`hpcdist.new_group` marks it as left by this rank, without a message, and MPI
gets the communicator back when all members have left: a group that one member still has is kept.
"""

from __future__ import annotations

import sys
from typing import Any

from hpcdist import _engine
from hpcdist.groups.world import world

#: References to a communicator that nothing uses: the engine's, the list's and the argument's.
_UNUSED = 3


def free_dropped() -> None:
    """Free the groups that nothing refers to any more, and that have nothing in flight."""
    for _ in range(len(world.dropped)):
        try:
            comms = world.dropped.popleft()
        except IndexError:
            return  # another thread has taken it
        # a Work, a window or a bound method may still use it
        while comms and sys.getrefcount(comms[-1]) <= _UNUSED and _engine.leave(comms[-1]):
            comms.pop()
        if comms:
            world.dropped.append(comms)


def take_dropped() -> list[Any]:
    """Return what is left of them, the youngest first, and forget it."""
    found: list[Any] = []
    while world.dropped:
        found += world.dropped.pop()
    return [comm for comm in found if comm.native is not None]
