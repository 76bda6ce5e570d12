"""Calls in which a line raises, as a signal handler could there."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable
from typing import Any


class Stop(Exception):
    """What the handler raises."""


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
