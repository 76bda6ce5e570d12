"""The one way from an argument ``group=`` to a group, and to what carries its operations."""

from __future__ import annotations

from typing import Any

from hpcdist.backends.carrier import Carrier
from hpcdist.backends.dispatch import agreeing
from hpcdist.groups.process_group import ProcessGroup
from hpcdist.groups.world import NOT_INITIALIZED, NonMember, world
from hpcdist.typing import TensorLike


def default_group() -> ProcessGroup:
    """Return the default group, or raise ValueError."""
    if world.pg is None:
        raise ValueError(NOT_INITIALIZED)
    return world.pg


def resolve(group: object) -> ProcessGroup | NonMember:
    """Return the group an argument means: None means the default group."""
    if group is None:
        return default_group()
    if isinstance(group, (ProcessGroup, NonMember)):
        return group
    raise TypeError(
        f"group must be a process group of hpcdist or None, not {type(group).__name__}: {group!r}"
    )


def carrier_of(group: Any) -> Carrier:
    """Return what carries the operations of an explicit group, or its stand-in."""
    try:
        return group.carrier
    except AttributeError:
        return resolve(group).carrier


def member(group: object) -> ProcessGroup:
    """Return a live group that this process is in, or raise ValueError."""
    pg = resolve(group)
    if isinstance(pg, NonMember):
        raise ValueError("this process is not in the given group")
    if pg not in world.groups:
        raise ValueError(f"the process group {pg.members.name!r} has been destroyed")
    return pg


def checked_root(
    pg: ProcessGroup | NonMember,
    api: str,
    tensor: TensorLike,
    rank: int | None,
    group_rank: int | None,
    what: str,
) -> int:
    """Return the group rank of a collective's root; the other ranks receive an error here too."""
    try:
        return pg.members.place(rank, group_rank, what)
    except Exception as error:
        agreeing(pg.carrier, tensor).refuse(error, api=api)
        raise
