"""Options of the calls of a :class:`hpcdist.Window`, under torch's names."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum


@dataclass
class PutOptions:
    """Options of ``put``, ``get`` and ``accumulate`` of a :class:`hpcdist.Window`.

    Parameters
    ----------
    timeout : datetime.timedelta, optional
        For the peer's answer, or, where its memory is mapped, for the memory, which only
        ``accumulate`` waits for. None means the group's.
    hints : dict
        Not used.

    Notes
    -----
    Source: torch 2.15.
    """

    timeout: timedelta | None = None
    hints: dict[str, str] = field(default_factory=dict)


class SignalOptions(PutOptions):
    """Options of ``signal`` of a :class:`hpcdist.Window`, as in :class:`PutOptions`.

    `timeout` is for the signal to be on its way.

    Notes
    -----
    Source: torch 2.15.
    """


class WaitSignalOptions(PutOptions):
    """Options of ``wait_signal`` of a :class:`hpcdist.Window`, as in :class:`PutOptions`.

    After `timeout` without a signal the wait is an error.

    Notes
    -----
    Source: torch 2.15.
    """


class WindowAccessType(Enum):
    """Whether a rank's memory is mapped by the others (UNIFIED), or reached by messages (SEPARATE).

    In both a rank sees what others have put into its memory, without a call.

    Parameters
    ----------
    value : int
        0 or 1.

    Notes
    -----
    Source: torch 2.15.
    """

    UNIFIED = 0
    SEPARATE = 1


@dataclass(frozen=True)
class WindowAttr:
    """What a peer's window memory is like.

    Parameters
    ----------
    access_type : WindowAccessType
        UNIFIED where :meth:`Window.map_remote_tensor` works.

    Notes
    -----
    Source: torch 2.15.
    """

    access_type: WindowAccessType = WindowAccessType.UNIFIED


def seconds_of(options: PutOptions | None) -> float | None:
    """Seconds that options name, or None.

    Parameters
    ----------
    options : PutOptions, optional
        Of any call, or torch's of the same name. A number as timeout is in seconds.

    Raises
    ------
    TypeError
        If it is none of those, or its timeout no time.
    ValueError
        If the timeout is negative.
    """
    if options is None:
        return None
    if not hasattr(options, "timeout"):
        raise TypeError(f"opts must be a PutOptions, not {type(options).__name__}")
    timeout: object = options.timeout
    if timeout is None:
        return None
    if isinstance(timeout, timedelta):
        timeout = timeout.total_seconds()
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)):
        raise TypeError(
            f"timeout must be a datetime.timedelta or seconds, not {type(timeout).__name__}"
        )
    if not timeout >= 0:
        raise ValueError(f"timeout must be zero or more, not {timeout} s")
    return float(timeout)
