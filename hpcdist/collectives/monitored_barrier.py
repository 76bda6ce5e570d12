"""A barrier with a deadline of its own that names who is missing, on every rank."""

from __future__ import annotations

from datetime import timedelta

from hpcdist._buffer import limited
from hpcdist._engine import Comm, op_range
from hpcdist.backends.dispatch import agreeing
from hpcdist.backends.refusal import refusing
from hpcdist.groups.state import ProcessGroup, _resolve

__all__ = ["monitored_barrier"]

API = "monitored_barrier"

#: Seconds for a timeout of zero: rank 0 asks who is here, and the others are here for it.
_ASKS, _WAITS = 0.02, 0.5


def monitored_barrier(
    group: ProcessGroup | None = None,
    timeout: timedelta | float | None = None,
    wait_all_ranks: bool = False,
) -> None:
    """Wait until all ranks of the group are here, or say which are not.

    All ranks of the group must call it, a late one too: its call fails like the others', and all
    ranks are in step again.

    Parameters
    ----------
    group : ProcessGroup, optional
        None means the default group.
    timeout : datetime.timedelta or float, optional
        How long to wait; a number is seconds. With zero, rank 0 asks who is here already. None
        means the group's timeout.
    wait_all_ranks : bool
        Accepted for torch's sake: all missing ranks are named either way, because one deadline
        holds for all of them.

    Raises
    ------
    DistTimeoutError
        On all ranks that called, with the missing ones; on a late one, when it calls.
    DistMismatchError
        On all ranks, where some are in another operation of the group.
    ValueError
        If the timeout is negative. The other ranks hear of it.

    Notes
    -----
    Source: ``torch.distributed.monitored_barrier``.
    """
    pg = _resolve(group)
    comm = pg._comm
    if comm.rank < 0:
        comm.report(API, 3)
        return
    agreed = agreeing(comm)
    with refusing(agreed, API):
        seconds = comm.timeout if timeout is None else _seconds(timeout)
    if isinstance(agreed, Comm):
        with op_range(API, pg._name):
            agreed.barrier(api=API, monitored=seconds or (_WAITS if comm.rank else _ASKS))
        return
    with limited(seconds or _ASKS):
        comm.barrier()


def _seconds(timeout: timedelta | float) -> float:
    value = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
    if not value >= 0:
        raise ValueError(f"timeout must not be negative, not {timeout}")
    return value
