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


@contextmanager
def interrupting(
    every: float = 0.0,
) -> Iterator[Callable[[Callable[[], object], float], Stop | None]]:
    """Yield ``interrupted(call, seconds)``: in the call a handler raises after so many seconds.

    With `every` it raises again after each so many seconds more, until the call is over. It returns
    what was raised, or None. A busy machine may have the signal come when the call is over and its
    timer stopped: the handler raises between the two ends of the call only. What it raises while
    an object is destroyed reaches nobody, and is no defect.
    """
    armed = False
    unraisable = sys.unraisablehook

    def handle(*_: object) -> None:
        if armed:
            raise Stop

    def interrupted(call: Callable[[], object], seconds: float) -> Stop | None:
        nonlocal armed
        try:
            armed = True
            signal.setitimer(signal.ITIMER_REAL, seconds, every)
            call()
            armed = False
        except Stop as error:
            armed = False
            return error
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        return None

    def ignored(about: Any) -> None:
        if about.exc_type is not Stop:
            unraisable(about)

    sys.unraisablehook = ignored
    before = signal.signal(signal.SIGALRM, handle)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGALRM, before)
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
