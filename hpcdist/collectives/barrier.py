"""The barrier: all ranks of a group wait for each other."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, overload

from hpcdist._buffer import limited
from hpcdist._engine import Work
from hpcdist.backends.dispatch import agreeing, barrier_device
from hpcdist.backends.refusal import refusing
from hpcdist.groups.limits import seconds_of
from hpcdist.groups.process_group import Group, ProcessGroup
from hpcdist.groups.resolve import carrier_of
from hpcdist.groups.state import world as _world
from hpcdist.typing import Async, Sync


@overload
def barrier(
    group: Group = ..., async_op: Sync = ..., device_ids: Any = ..., timeout: timedelta | None = ...
) -> None: ...


@overload
def barrier(
    group: Group = ..., *, async_op: Async, device_ids: Any = ..., timeout: timedelta | None = ...
) -> Work: ...


@overload
def barrier(
    group: Group = ..., async_op: bool = ..., device_ids: Any = ..., timeout: timedelta | None = ...
) -> Work | None: ...


def barrier(
    group: ProcessGroup | None = None,
    async_op: bool = False,
    device_ids: Any = None,
    timeout: timedelta | None = None,
) -> Work | None:
    """Wait until all ranks of the group have called.

    All ranks of the group must call it.

    Parameters
    ----------
    group : ProcessGroup, optional
        None means the default group.
    async_op : bool
        Return at once; the handle is done when all ranks have called.
    device_ids : list of int, optional
        Over NCCL alone, the barrier runs on the GPU of the first index; None means the group's
        ``device_id``, else the current one. A barrier over MPI involves no device.
    timeout : datetime.timedelta, optional
        After this long a missing rank is an error; None means the group's timeout.

    Returns
    -------
    Work or None
        A handle if `async_op` is true. None otherwise, and outside the group, with a warning there.

    Raises
    ------
    TypeError, ValueError
        If an argument is of the wrong type, or the timeout is not positive.
    DistMismatchError
        On all ranks, if some of them are in another operation.
    DistTimeoutError
        If a rank does not call in time.

    Notes
    -----
    Source: ``torch.distributed.barrier``.
    """
    comm = _world.comm if group is None else carrier_of(group)
    if timeout is None and device_ids is None or comm.rank < 0:
        return comm.barrier(async_op)
    with refusing(agreeing(comm), "barrier"):
        if device_ids is not None and not isinstance(device_ids, list):
            raise TypeError(f"device_ids must be a list of int, not {type(device_ids).__name__}")
        about = barrier_device(comm, device_ids[0] if device_ids else None)
        seconds = None if timeout is None else seconds_of(timeout)
    if seconds is None:
        return comm.barrier(async_op, **about)
    with limited(seconds):
        return comm.barrier(async_op, **about)
