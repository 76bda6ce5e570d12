"""Calls in which a line raises, as a signal handler could there, or in which a handler raises."""

from __future__ import annotations

import linecache
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Stop(Exception):
    """What the handler raises."""


#: A call, and after how many seconds a handler raises: what it raised.
Interrupted = Callable[[Callable[[], object], float], Stop | None]


class Alarm:
    """SIGALRM within a call. Its handler acts within calls only.

    A busy machine may have the signal come when the call is over and its timer stopped.
    """

    def __init__(self, every: float = 0.0) -> None:
        self.every = every
        self.inside = False
        self.before = signal.signal(signal.SIGALRM, self._handle)

    def around(self, call: Callable[[], object], seconds: float) -> None:
        """Make a call; the signal comes after so many seconds, and after each `every` more."""
        try:
            self.inside = True
            signal.setitimer(signal.ITIMER_REAL, seconds, self.every)
            call()
            self.inside = False
        finally:
            self.inside = False
            signal.setitimer(signal.ITIMER_REAL, 0)

    def act(self) -> None:
        """Do what the handler does."""
        raise Stop

    def _handle(self, *_: object) -> None:
        if self.inside:
            self.act()


@contextmanager
def interrupting(
    every: float = 0.0,
) -> Iterator[Callable[[Callable[[], object], float], Stop | None]]:
    """Yield ``interrupted(call, seconds)``: in the call a handler raises after so many seconds.

    With `every` it raises again after each so many seconds more, until the call is over. It returns
    what was raised, or None. What it raises while an object is destroyed reaches nobody, and is no
    defect.
    """
    alarm = Alarm(every)
    unraisable = sys.unraisablehook

    def interrupted(call: Callable[[], object], seconds: float) -> Stop | None:
        try:
            alarm.around(call, seconds)
        except Stop as error:
            return error
        return None

    def ignored(about: Any) -> None:
        if about.exc_type is not Stop:
            unraisable(about)

    sys.unraisablehook = ignored
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGALRM, alarm.before)
        sys.unraisablehook = unraisable


def breaking(
    call: Callable[[], object],
    at: int,
    file: str,
    begun: Callable[[Any], bool] = lambda frame: True,
) -> bool:
    """Make a call in which a line of a file raises :class:`Stop`; return whether one did.

    Parameters
    ----------
    call : callable
        The call.
    at : int
        The line, counted as lines run. Those that say that no signal handler runs do not count.
    file : str
        The end of the file's path.
    begun : callable
        Of a frame: whether its lines count already.
    """
    left = at

    def look(frame: Any, event: str, _: Any) -> Any:
        nonlocal left
        if not frame.f_code.co_filename.endswith(file):
            return None
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        if event == "line" and begun(frame) and "no signal handler runs" not in line:
            left -= 1
            if left < 0:
                sys.settrace(None)
                raise Stop
        return look

    sys.settrace(look)
    try:
        call()
    except Stop:
        return True
    finally:
        sys.settrace(None)
    return False
