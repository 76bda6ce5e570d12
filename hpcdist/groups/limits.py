"""Timeouts of groups: what is one, and how it becomes seconds and back."""

from __future__ import annotations

from datetime import timedelta

#: Seconds that no timedelta has. The clocks of the native code take any number.
_LONGEST = timedelta.max.total_seconds()


def seconds_of(timeout: timedelta) -> float:
    """Return a timeout in seconds.

    Parameters
    ----------
    timeout : datetime.timedelta
        Longer than zero.

    Raises
    ------
    TypeError
        If it is no timedelta.
    ValueError
        If it is not positive.
    """
    if not isinstance(timeout, timedelta):
        raise TypeError(f"timeout must be a datetime.timedelta, not {timeout!r}")
    if timeout <= timedelta(0):
        raise ValueError(f"timeout must be positive, not {timeout}")
    return timeout.total_seconds()


def limit_of(seconds: float) -> timedelta:
    """Return seconds as a timedelta, the longest one for more than it can hold."""
    return timedelta(seconds=seconds) if seconds < _LONGEST else timedelta.max
