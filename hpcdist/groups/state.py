"""The groups of this process: the registry, the default group, and the translation of ranks.

``hpcdist.group.WORLD`` is the default group, or None before
:func:`hpcdist.init_process_group`.
"""

from __future__ import annotations

import logging
import math
import time
import zlib
from typing import Any, NewType, cast

from hpcdist import log
from hpcdist.backends.carrier import Carrier
from hpcdist.backends.mpi import level_name
from hpcdist.errors import DistError
from hpcdist.groups.kept import lose
from hpcdist.groups.members import short
from hpcdist.groups.numbers import whole
from hpcdist.groups.process_group import ProcessGroup
from hpcdist.groups.resolve import carrier_of, member
from hpcdist.groups.world import OUTSIDE, Absent, world

__all__ = [
    "GroupMember",
    "GroupName",
    "ProcessGroup",
    "get_global_rank",
    "get_group_rank",
    "get_process_group_ranks",
    "get_rank",
    "get_world_size",
    "is_initialized",
]

#: The type of :attr:`hpcdist.ProcessGroup.group_name`, to type checkers.
GroupName = NewType("GroupName", str)

#: The most seconds that the destruction of a group waits for its outstanding operations.
DRAIN = 30.0

_log = log.get_logger("group")


def __getattr__(name: str) -> Any:
    if name == "WORLD":
        return world.pg
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class _MemberType(type):
    @property
    def WORLD(cls) -> ProcessGroup | None:
        """The default group, or None before init_process_group."""
        return world.pg


class GroupMember(metaclass=_MemberType):
    """Two constants: ``GroupMember.WORLD`` and ``GroupMember.NON_GROUP_MEMBER``.

    ``WORLD`` is the default group, None before :func:`hpcdist.init_process_group`.
    :func:`hpcdist.new_group` returns ``NON_GROUP_MEMBER`` (-100, as in torch) to a process outside
    the group; operations on it warn and do nothing.

    Notes
    -----
    Source: ``torch.distributed.GroupMember``.
    """

    NON_GROUP_MEMBER = OUTSIDE


def add(pg: ProcessGroup) -> None:
    """Register a new group; the first one is the default group."""
    world.groups[pg] = None
    if any(each.native is None for each in pg._backends.values()):
        pg._hold()  # the ranks must free it in the same order
    if world.pg is None:
        world.pg = pg
        world.comm = pg.carrier
    if _log.isEnabledFor(logging.INFO):
        _log.info(
            "group %r made: backend %s, ranks %s, timeout %g s, entry check %s",
            pg.members.name,
            pg._config,
            short(pg.members.ranks),
            pg.carrier.timeout,
            level_name(pg.carrier.check),
        )


def waits_on(problem: BaseException | None) -> bool:
    """Whether to go on waiting after an error: not after an exception of a signal handler."""
    return problem is None or isinstance(problem, DistError)


def leave_handler(pg: ProcessGroup) -> None:
    """Raise if a signal handler that interrupted an operation of this group wants to destroy it."""
    for backend in pg._backends.values():
        refuse = getattr(backend, "leave_handler", None)
        if refuse is not None:
            refuse()


def remove(pg: ProcessGroup, end: float = math.inf) -> None:
    """Remove a group from the registry and free it; any later use raises.

    `end`, of ``time.monotonic``, limits the wait for its outstanding operations.
    """
    leave_handler(pg)
    if pg in world.kept:
        lose(pg, "has been destroyed", [])
        return
    world.groups.pop(pg, None)
    world.held.discard(pg)
    _log.info("group %r is being destroyed", pg.members.name)
    # a backend made over another one is freed before that one
    backends = list(dict.fromkeys(reversed(pg._backends.values())))
    drain = min(pg.carrier.timeout, DRAIN, max(end - time.monotonic(), 0.2))
    why = f"the process group {pg.members.name!r} has been destroyed"
    pg.carrier = cast(Carrier, Absent(why))
    pg._backends = {}
    pg.hooks.clear()
    problem: BaseException | None = None
    for backend in backends:
        try:
            backend.free(drain if waits_on(problem) else 0.0)
        except BaseException as error:  # free the others too, also after Ctrl-C
            problem = problem or error
    if problem is not None:
        raise problem


def new_name(ranks: tuple[int, ...]) -> str:
    """Return the name of a new group; its members choose the same one without communication.

    The members create groups of the same ranks in the same order, so it is enough to count those;
    processes outside need not count. Only groups that the members have agreed to make are counted:
    after an attempt that failed because a member was missing, all must choose the same name at the
    next attempt. Groups that a recovery has made again keep their names, which no other gets.
    """
    text = short(ranks)
    if text.endswith(")"):  # not all are in it
        text = f"{text[:-1]}, {zlib.crc32(str(ranks).encode()):08x})"
    before = max(world.counts.get(ranks, 0), world.taken.get(text, 0))
    return f"{text}#{before + 1}"


def count(counts: dict[tuple[int, ...], int], ranks: tuple[int, ...], name: str) -> None:
    """Count the group of this name, of :func:`new_name`, among those of its world; once or more."""
    counts[ranks] = int(name.rpartition("#")[2])


def is_initialized() -> bool:
    """Return whether the default group exists.

    Returns
    -------
    bool
        True between :func:`hpcdist.init_process_group` and
        :func:`hpcdist.destroy_process_group`.

    Notes
    -----
    Local to this process. Source: ``torch.distributed.is_initialized``.
    """
    return world.pg is not None


def get_rank(group: ProcessGroup | None = None) -> int:
    """Return the rank of this process in a group.

    Parameters
    ----------
    group : ProcessGroup, optional
        None means the default group.

    Returns
    -------
    int
        Between 0 and the group's size - 1; -1 outside the group.

    Raises
    ------
    ValueError
        If there is no default group, or the group was destroyed.

    Notes
    -----
    Local to this process. Source: ``torch.distributed.get_rank``.
    """
    return world.comm.rank if group is None else carrier_of(group).rank


def get_world_size(group: ProcessGroup | None = None) -> int:
    """Return the number of processes in a group.

    Parameters
    ----------
    group : ProcessGroup, optional
        None means the default group.

    Returns
    -------
    int
        At least 1; -1 outside the group.

    Raises
    ------
    ValueError
        If there is no default group, or the group was destroyed.

    Notes
    -----
    Local to this process. Source: ``torch.distributed.get_world_size``.
    """
    return world.comm.size if group is None else carrier_of(group).size


def get_group_rank(group: ProcessGroup, global_rank: int) -> int:
    """Translate a rank of the world into a rank of a group.

    Parameters
    ----------
    group : ProcessGroup
        A group this process is in.
    global_rank : int
        Rank in the world.

    Returns
    -------
    int
        Rank in the group.

    Raises
    ------
    ValueError
        If that rank, or this process, is not in the group.

    Notes
    -----
    Local to this process. Source: ``torch.distributed.get_group_rank``.
    """
    pg = member(group)
    global_rank = whole(global_rank, "global_rank")
    try:
        return pg.members.index[global_rank]
    except KeyError:
        raise ValueError(
            f"rank {global_rank} of the world is not in the group {pg.members.name!r}, whose ranks "
            f"are {short(pg.members.ranks)}"
        ) from None


def get_global_rank(group: ProcessGroup, group_rank: int) -> int:
    """Translate a rank of a group into a rank of the world.

    Parameters
    ----------
    group : ProcessGroup
        A group this process is in.
    group_rank : int
        Rank in the group.

    Returns
    -------
    int
        Rank in the world.

    Raises
    ------
    ValueError
        If the group has no such rank, or this process is not in it.

    Notes
    -----
    Local to this process. Source: ``torch.distributed.get_global_rank``.
    """
    pg = member(group)
    return pg.members.ranks[pg.members.check(group_rank, "group_rank")]


def get_process_group_ranks(group: ProcessGroup | None) -> list[int]:
    """List the members of a group.

    Parameters
    ----------
    group : ProcessGroup or None
        None means the default group.

    Returns
    -------
    list of int
        Ranks in the world, in the order of their ranks in the group.

    Raises
    ------
    ValueError
        If this process is not in the group.

    Notes
    -----
    Local to this process. Source: ``torch.distributed.get_process_group_ranks``.
    """
    return list(member(group).members.ranks)
