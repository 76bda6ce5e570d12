"""What all stores share: keys and values as bytes, deadlines, and the text of a timeout."""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Iterable
from datetime import timedelta

from hpcdist.errors import StoreTimeoutError

#: The default of torch's stores.
DEFAULT_TIMEOUT = timedelta(seconds=300)

Timeout = timedelta | float

#: Seconds: longer timeouts mean no limit, and would not fit into the clocks' nanoseconds.
LONGEST = 1e9

#: Keys that a message names before it only counts them.
_NAMED = 8


def seconds_of(timeout: Timeout) -> float:
    """Return a timeout in seconds.

    Parameters
    ----------
    timeout : datetime.timedelta or float
        Not negative; 0 means "look once".

    Returns
    -------
    float
        Seconds, at most `LONGEST`.

    Raises
    ------
    TypeError
        If it is neither a timedelta nor a number.
    ValueError
        If it is negative, infinite or not a number.
    """
    if isinstance(timeout, timedelta):
        seconds = timeout.total_seconds()
    elif isinstance(timeout, (int, float)) and not isinstance(timeout, bool):
        seconds = float(timeout)
    else:
        raise TypeError(
            f"a timeout must be a datetime.timedelta or seconds, not {type(timeout).__name__}"
        )
    if not (seconds >= 0 and math.isfinite(seconds)):
        raise ValueError(f"a timeout must be finite and not negative, not {timeout!r}")
    return min(seconds, LONGEST)


class Deadline:
    """A point in time until which an operation may wait.

    Parameters
    ----------
    seconds : float
        From now.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        """Return the seconds that remain; 0 once it has passed."""
        return max(0.0, self._end - time.monotonic())

    def expired(self) -> bool:
        """Return whether it has passed."""
        return time.monotonic() >= self._end


def key_of(key: str | bytes) -> str:
    """Return a key as text; bytes must be UTF-8."""
    if isinstance(key, str):
        return key
    if isinstance(key, bytes):
        return key.decode()
    raise TypeError(f"a key must be a str, not {type(key).__name__}")


def key_list(keys: Iterable[str | bytes]) -> list[str]:
    """Return keys as a list of text; refuse a single string, whose letters would count as keys."""
    if isinstance(keys, (str, bytes)):
        raise TypeError(f"keys must be a list of str, not one {type(keys).__name__}: [{keys!r}]")
    return [key_of(key) for key in keys]


def value_of(value: str | bytes | bytearray | memoryview) -> bytes:
    """Return a value as bytes; text is encoded as UTF-8."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, (bytearray, memoryview)):
        return bytes(value)
    raise TypeError(f"a value must be str or bytes, not {type(value).__name__}")


def whole(value: int, name: str) -> int:
    """Return an integer argument, which must fit into 64 bits."""
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be a whole number, not {value!r}") from None
    if not -(1 << 63) <= number < 1 << 63:
        raise ValueError(f"{name} must fit into 64 bits, not {number}")
    return number


def timed_out(
    what: str, seconds: float, keys: Iterable[str], where: str, more: str = "", total: int = 0
) -> StoreTimeoutError:
    """Return the error for keys that were not set in time.

    Parameters
    ----------
    what : str
        The operation.
    seconds : float
        How long it waited.
    keys : iterable of str
        The keys that are missing.
    where : str
        The store: its kind and place.
    more : str
        Text to append.
    total : int
        How many are missing, if `keys` are not all of them.

    Returns
    -------
    StoreTimeoutError
        To be raised.
    """
    names = list(keys)
    shown = ", ".join(names[:_NAMED])
    unnamed = max(total, len(names)) - min(len(names), _NAMED)
    if unnamed:
        shown += f" and {unnamed} more"
    text = f"{what} timeout after {round(seconds * 1000)}ms, keys: {shown} ({where})"
    return StoreTimeoutError(f"{text}; {more}" if more else text)
