"""A barrier with its own deadline, whose error names the missing ranks on every rank."""

from __future__ import annotations

from datetime import timedelta

from hpcdist._buffer import limited
from hpcdist._engine import op_range
from hpcdist.backends.dispatch import agreeing
from hpcdist.backends.refusal import refusing
from hpcdist.groups.resolve import resolve
from hpcdist.groups.state import ProcessGroup
from hpcdist.groups.world import NonMember, warn_outside

API = "monitored_barrier"

#: Seconds that a timeout of zero stands for: enough for rank 0 to learn which ranks have called.
_ASKS, _WAITS = 0.02, 0.5


def monitored_barrier(
    group: ProcessGroup | None = None,
    timeout: timedelta | float | None = None,
    wait_all_ranks: bool = False,
) -> None:
    """Wait until all ranks of the group have called, or raise an error that names the missing ones.

    All ranks of the group must call it, also a late one: its call fails as the others' did, and
    then all ranks are in step again.

    Parameters
    ----------
    group : ProcessGroup, optional
        None means the default group.
    timeout : datetime.timedelta or float, optional
        How long to wait; a number is seconds. With zero, rank 0 only asks which ranks have called
        already. None means the group's timeout.
    wait_all_ranks : bool
        Accepted for compatibility with torch: all missing ranks are named either way, because one
        deadline applies to all of them.

    Raises
    ------
    DistTimeoutError
        On all ranks that called, with the missing ranks; on a late rank, when it calls.
    DistMismatchError
        On all ranks, if some are in another operation of the group.
    ValueError
        If the timeout is negative. The other ranks receive this error too.

    Notes
    -----
    Source: ``torch.distributed.monitored_barrier``.
    """
    pg = resolve(group)
    if isinstance(pg, NonMember):
        warn_outside(API, 3)
        return
    comm = pg.carrier
    agreed = agreeing(comm)
    with refusing(agreed, API):
        seconds = comm.timeout if timeout is None else _seconds(timeout)
    if agreed.native is not None:
        with op_range(API, pg.members.name):
            agreed.barrier(api=API, monitored=seconds or (_WAITS if comm.rank else _ASKS))
        return
    with limited(seconds or _ASKS):
        comm.barrier()


def _seconds(timeout: timedelta | float) -> float:
    value: object = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(
            f"timeout must be a datetime.timedelta or seconds, not {type(timeout).__name__}"
        )
    if not value >= 0:
        raise ValueError(f"timeout must be zero or more, not {timeout}")
    return float(value)
