"""Destroys groups, and with the default group the world."""

from __future__ import annotations

import time

from hpcdist import log
from hpcdist.groups import state as _group
from hpcdist.groups.dropped import free_dropped, take_dropped
from hpcdist.groups.resolve import member
from hpcdist.groups.state import GroupMember, ProcessGroup
from hpcdist.startup import spares


def destroy_process_group(group: ProcessGroup | None = None) -> None:
    """Free a group, or all groups.

    All members must call it. It waits for the outstanding operations of all groups together, for
    the group's timeout or 30 seconds, whichever is shorter. If only receives are left whose
    messages do not arrive, it waits three seconds and cancels them. Then it waits up to a second
    for the other members. If they do not call, or a message was sent and never received, MPI's
    communicator is kept, because MPI would match what is still in flight with messages of the next
    group. MPI itself stays up, so that :func:`init_process_group` may be called again.

    Parameters
    ----------
    group : ProcessGroup, optional
        None or the default group frees all groups.

    Raises
    ------
    ValueError
        If there is no default group, or the group was destroyed already.
    DistTimeoutError
        If an operation is still outstanding then. The group is destroyed nevertheless; the
        operation keeps its tensors.
    DistError
        An error of an operation in flight over NCCL, if no call has raised it yet.

    Notes
    -----
    Source: ``torch.distributed.destroy_process_group``.
    """
    if group is GroupMember.NON_GROUP_MEMBER or (group is None and spares.was_unused()):
        return
    pg = member(group)
    if pg is not _group.world.pg:
        _group.remove(pg)
        return
    for each in _group.world.groups:
        _group.leave_handler(each)
    free_dropped()
    spares.dismiss(pg)
    problem: BaseException | None = None
    end = time.monotonic() + min(pg.carrier.timeout, _group.DRAIN)
    # the youngest first: members made their groups in the same order, so they free them in the same
    for each in reversed(list(_group.world.groups)):
        try:
            _group.remove(each, end if _group.waits_on(problem) else 0.0)
        except BaseException as error:  # free the others too, also after Ctrl-C
            problem = problem or error
    # what is in flight there, and what a handler's exception kept from being adopted
    for comm in (*take_dropped(), *_group.world.renewal[:1]):
        try:
            comm.free(max(end - time.monotonic(), 0.2), agree=False)
        except BaseException as error:
            problem = problem or error
    _group.world.forget()
    log.set_rank(None)
    if problem is not None:
        raise problem
