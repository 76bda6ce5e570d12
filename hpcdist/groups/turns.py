"""Threads of a process that make groups of the same ranks do so one after the other.

The name of a group is its ranks and a count: the second thread can choose it only when the first
one has made its group, or has failed. Threads that make groups of different ranks do not wait for
each other, for the members may make these in any order.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

from hpcdist import _engine
from hpcdist.errors import DistTimeoutError

#: Seconds between two looks at the queue.
_STEP = 0.001


class _Place:
    """A place in a queue. It is free again when nothing refers to it, whatever exception came."""

    __slots__ = ("__weakref__", "key", "thread")

    def __init__(self, key: tuple[int, ...]) -> None:
        self.key = key
        self.thread = threading.get_ident()


#: In the order in which they came, whatever the ranks; a change of it is one step of the
#: interpreter.
_places: dict[weakref.ref[_Place], None] = {}


@contextmanager
def turn(ranks: tuple[int, ...], end: float) -> Iterator[None]:
    """Wait until no other thread makes a group of these ranks, and keep others from it meanwhile.

    Below ``MPI_THREAD_MULTIPLE`` only one thread may be in MPI: then the ranks do not matter.

    Parameters
    ----------
    ranks : tuple of int
    end : float
        Of ``time.monotonic``.

    Raises
    ------
    DistTimeoutError
        If it is not over by then.
    """
    key = ranks if _engine.thread_level() == "multiple" else ()
    place = _Place(key)
    own = weakref.ref(place)
    try:
        _places[own] = None
        while not _is_first(own, place):
            if time.monotonic() >= end:
                raise DistTimeoutError(
                    "no group was made within the timeout, because other threads of this rank were "
                    f"making groups {'of the same ranks' if key else 'and MPI allows one thread'} "
                    "all the time: are all members there?"
                )
            time.sleep(_STEP)
        yield
    finally:
        _places.pop(own, None)


def _is_first(own: weakref.ref[_Place], place: _Place) -> bool:
    """Whether no other thread is before this one; a call that a handler interrupted is no other."""
    for each in tuple(_places):
        if each is own:
            return True
        other = each()
        if other is None:
            _places.pop(each, None)
        elif other.key == place.key and other.thread != place.thread:
            return False
    return True
