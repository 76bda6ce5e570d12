"""Work that a signal handler must not cut short, because the other ranks wait for it."""

from __future__ import annotations

import _thread
import time
from collections.abc import Callable

#: Seconds between two looks at the thread.
_STEP = 0.0002


class Uninterrupted:
    """Does something once, in a thread of its own: no signal handler raises there.

    If a handler raises in a thread that waits for it, the next :meth:`wait` waits for the same.

    Parameters
    ----------
    work : callable
        What is done.

    Attributes
    ----------
    is_over : bool
        Whether it is done, or has failed.
    error : BaseException or None
        What it raised.
    """

    def __init__(self, work: Callable[[], object]) -> None:
        self._work = work
        self._first = _thread.allocate_lock()
        self.is_over = False
        self.error: BaseException | None = None

    def wait(self) -> None:
        """Do it, or wait until it is done; raise its error."""
        # Neither Thread.start nor Event.wait: while they release their locks, they raise a
        # RuntimeError in place of what a handler raises.
        if not self.is_over:
            _thread.start_new_thread(self._run, ())
        self._await()
        if self.error is not None:
            raise self.error

    def settle(self) -> None:
        """Wait until it is over if it has begun; else it never begins."""
        if self._first.acquire(blocking=False):
            self.error = RuntimeError("this was given up before it began")
            self.is_over = True
        self._await()

    def _await(self) -> None:
        while not self.is_over:
            time.sleep(_STEP)

    def _run(self) -> None:
        if not self._first.acquire(blocking=False):
            return
        try:
            self._work()
        except BaseException as error:
            self.error = error
        self.is_over = True
