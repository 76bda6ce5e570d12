"""Gives users' futures a deadline, because they have none."""

from __future__ import annotations

import threading
import time
from typing import Any

import torch

from hpcdist.backends.carrier import Carrier
from hpcdist.errors import DistError, DistTimeoutError

# What `.then` returns is of the base class.
_PLAIN = (torch.futures.Future, torch._C.Future)
# The maximum of Event.wait; 50 days.
_LONGEST = threading.TIMEOUT_MAX / 2
# Seconds for the operation behind a future to say which rank it waits for, when its time is over.
_GRACE = 0.5


class Bounded:
    """A future that is waited for until a deadline.

    Parameters
    ----------
    future : torch.futures.Future
        Any thread may complete it, or none.
    comm : object
        The communicator whose timeout counts, from now on, and half a second more.
    what : str
        What the future stands for, for the message.
    """

    def __init__(self, future: torch.futures.Future[Any], comm: Carrier, what: str) -> None:
        self._future = future
        self._carrier = comm
        self._what = what
        self._seconds = float(comm.timeout)
        self._began = time.monotonic()

    def wait(self) -> Any:
        """Wait within the group's timeout, and return the value.

        Raises
        ------
        DistTimeoutError
            If it is not complete in time.
        """
        self._complete()
        return self._future.wait()

    def give_up(self) -> None:
        """Wait for it without using its value.

        Raises
        ------
        DistError
            If it failed. Torch's futures keep no types: any error may be one of communication.
        """
        self._complete()
        try:
            self._future.wait()
        except DistError:
            raise
        except Exception as error:
            raise DistError(f"{self._what} failed: {error}") from error

    def _complete(self) -> None:
        if not self._future.done():
            over = threading.Event()
            self._future.add_done_callback(lambda _: over.set())
            while not over.wait(self._left()):
                if self._left() == 0.0:
                    raise self._timeout()

    def _left(self) -> float:
        if self._seconds < 0:
            return _LONGEST
        left = self._began + self._seconds + _GRACE - time.monotonic()
        return min(max(left, 0.0), _LONGEST)

    def _timeout(self) -> DistTimeoutError:
        after, comm = time.monotonic() - self._began, self._carrier
        return DistTimeoutError(
            f"timeout after {after:.3g} s in {self._what} (group {comm.name!r}, this is rank "
            f"{comm.rank} of {comm.size}): the future that the hook returned is not complete"
        )


def bounded(work: Any, comm: Carrier, what: str) -> Any:
    """Return a waitable; a plain future gets the group's timeout.

    The engine's handles, and what runs in the waiting thread, have their own deadlines.
    """
    if type(work) in _PLAIN:
        return Bounded(work, comm, what)
    return work


def give_up(work: Any) -> None:
    """Wait for the communication behind a hook's result, and for as little else as possible.

    hpcdist's futures drop what would follow it: further collectives, a step. Another future's
    callbacks run by themselves, so that one is waited for.
    """
    getattr(work, "give_up", work.wait)()
