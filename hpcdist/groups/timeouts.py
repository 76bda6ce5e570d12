"""How long a group waits for a missing peer."""

from __future__ import annotations

from datetime import timedelta

from hpcdist.config import DEFAULT_TIMEOUT
from hpcdist.groups.resolve import member
from hpcdist.groups.state import ProcessGroup

#: Of a group that is created without a timeout, on MPI and on NCCL.
default_pg_timeout = timedelta(seconds=DEFAULT_TIMEOUT)


def set_timeout(timeout: timedelta, group: ProcessGroup | None = None) -> None:
    """Set after what time a missing peer is an error in a group's later operations.

    All members must set the same value; the call itself does not communicate.

    Parameters
    ----------
    timeout : datetime.timedelta
        Longer than zero.
    group : ProcessGroup, optional
        A group this process is in; None means the default group.

    Raises
    ------
    TypeError
        If `timeout` is no timedelta.
    ValueError
        If it is not positive, or this process is not in the group.

    Notes
    -----
    The same as setting ``group.timeout``. Source: ``torch.distributed.set_timeout`` of torch 2.15.
    """
    member(group).timeout = timeout
