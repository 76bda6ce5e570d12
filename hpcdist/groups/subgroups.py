"""Divides a group into several groups that do not overlap."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import numpy as np

from hpcdist.backends import registry
from hpcdist.backends.registry import Backend, BackendConfig
from hpcdist.groups.new_group import checked, make, part_of_world, time_limit
from hpcdist.groups.resolve import default_group, member
from hpcdist.groups.state import GroupMember, ProcessGroup


def new_subgroups(
    group_size: int | None = None,
    group: ProcessGroup | None = None,
    timeout: timedelta | None = None,
    backend: str | None = None,
    pg_options: Any = None,
    group_desc: str | None = None,
) -> tuple[Any, list[Any]]:
    """Divide a group into subgroups of equal size, or into one per node.

    All ranks of `group` must call it.

    Parameters
    ----------
    group_size : int, optional
        Ranks in each subgroup, in order; must divide the group's size. None makes one subgroup per
        node, as MPI sees nodes, whatever the number of ranks per node.
    group : ProcessGroup, optional
        What to divide; None means the default group.
    timeout, backend, pg_options
        As for :func:`new_group`.
    group_desc : str, optional
        Description of each subgroup.

    Returns
    -------
    tuple
        The subgroup this process is in, and the list of all subgroups, where those it is not in are
        GroupMember.NON_GROUP_MEMBER.

    Raises
    ------
    ValueError
        If `group_size` is not positive or does not divide the group.
    DistTimeoutError
        If a member does not arrive within the timeout.

    Notes
    -----
    Source: ``torch.distributed.new_subgroups``, where None means the number of CUDA devices.
    """
    pg = member(group)
    world_ranks = pg.members.ranks
    if group_size is None:
        divided = _by_node(pg)
    else:
        group_size = operator.index(group_size)
        if group_size <= 0 or len(world_ranks) % group_size:
            raise ValueError(
                f"group_size={group_size} does not divide the {len(world_ranks)} ranks of the "
                f"group {pg.members.name!r}"
            )
        starts = range(0, len(world_ranks), group_size)
        divided = [world_ranks[start : start + group_size] for start in starts]
    return new_subgroups_by_enumeration(divided, timeout, backend, pg_options, group_desc)


def new_subgroups_by_enumeration(
    ranks_per_subgroup_list: Sequence[Sequence[int]],
    timeout: timedelta | None = None,
    backend: str | None = None,
    pg_options: Any = None,
    group_desc: str | None = None,
) -> tuple[Any, list[Any]]:
    """Make several groups that do not overlap.

    All members of the groups must call it; other processes may.

    Parameters
    ----------
    ranks_per_subgroup_list : sequence of sequence of int
        Ranks of the world in each group.
    timeout, backend, pg_options
        As for :func:`new_group`.
    group_desc : str, optional
        Description of each group.

    Returns
    -------
    tuple
        The group this process is in, or None if it is in none, and the list of all groups, where
        those it is not in are GroupMember.NON_GROUP_MEMBER. Do not pass this None as an operation's
        ``group``: there it means the world.

    Raises
    ------
    ValueError
        If there are no groups, or a rank is out of range or in two of them.
    DistTimeoutError
        If a member does not arrive within the timeout.

    Notes
    -----
    Source: ``torch.distributed.new_subgroups_by_enumeration``.
    """
    parent = default_group()
    divided = [
        checked(ranks, len(parent.members.ranks), "world")
        for ranks in ranks_per_subgroup_list or ()
    ]
    if not divided:
        raise ValueError("ranks_per_subgroup_list must hold at least one list of ranks")
    _disjoint(divided, "ranks_per_subgroup_list")
    own = None
    made: list[Any] = []
    divides = sum(map(len, divided)) == len(parent.members.ranks)
    for ranks in divided:
        pg = part_of_world(sorted(ranks), timeout, backend, pg_options, group_desc, divides)
        made.append(pg)
        if pg is not GroupMember.NON_GROUP_MEMBER:
            own = pg
    return own, made


def split_group(
    parent_pg: ProcessGroup | None = None,
    split_ranks: Sequence[Sequence[int]] | None = None,
    timeout: timedelta | None = None,
    pg_options: Any = None,
    group_desc: str | None = None,
    backend: str | None = None,
) -> ProcessGroup | None:
    """Split a group into groups that do not overlap.

    All members of the new groups must call it; other ranks of the parent may.

    Parameters
    ----------
    parent_pg : ProcessGroup, optional
        What to split; None means the default group.
    split_ranks : sequence of sequence of int
        Per new group, its members as ranks of the parent. They keep the parent's order.
    timeout : datetime.timedelta, optional
        See :func:`new_group`; None means the parent's timeout.
    pg_options : object, optional
        See :func:`new_group`.
    group_desc : str, optional
        Description; None means the parent's with ``:split`` appended.
    backend : str, optional
        Which of the parent's backends to keep; None means all.

    Returns
    -------
    ProcessGroup or None
        The new group this process is in; None if it is in none. Do not pass this None as an
        operation's ``group``: there it means the world.

    Raises
    ------
    ValueError
        If `split_ranks` is empty, or a rank is out of range or in two groups, or `backend` is not
        the parent's.
    DistTimeoutError
        If a member does not arrive within the timeout.

    Notes
    -----
    Source: ``torch.distributed.split_group``.
    """
    parent = member(parent_pg)
    if not split_ranks:
        raise ValueError("split_ranks must hold at least one list of the parent's ranks")
    size = len(parent.members.ranks)
    where = f"group {parent.members.name!r}"
    divided = [tuple(sorted(checked(ranks, size, where))) for ranks in split_ranks]
    if not all(divided):
        raise ValueError("a list in split_ranks is empty")
    _disjoint(divided, "split_ranks")
    if backend is not None:
        _check_kept(backend, parent)
    limit = time_limit(timeout, parent)
    if group_desc is None:
        group_desc = parent._description + ":split"
    own = parent.carrier.rank
    divides = sum(map(len, divided)) == size
    for ranks in divided:
        if own in ranks:
            return make(parent, ranks, limit, backend, pg_options, group_desc, divides)
    return None


def _by_node(pg: ProcessGroup) -> list[tuple[int, ...]]:
    """World ranks per node; the nodes in order of their first ranks."""
    first = np.array([min(pg.carrier.node_ranks)], np.int64)
    firsts = np.empty(len(pg.members.ranks), np.int64)
    pg.carrier.all_gather_into_tensor(firsts, first, False, api="new_subgroups")
    nodes: dict[int, list[int]] = {}
    for rank, leader in zip(pg.members.ranks, firsts.tolist(), strict=True):
        nodes.setdefault(leader, []).append(rank)
    return [tuple(nodes[leader]) for leader in sorted(nodes)]


def _disjoint(divided: list[tuple[int, ...]], what: str) -> None:
    seen: dict[int, tuple[int, ...]] = {}
    for ranks in divided:
        for rank in ranks:
            if rank in seen:
                raise ValueError(
                    f"{what}: rank {rank} is in both {list(seen[rank])} and {list(ranks)}"
                )
            seen[rank] = ranks


def _check_kept(backend: str, parent: ProcessGroup) -> None:
    """Raise ValueError unless the parent has this backend for these devices."""
    have = BackendConfig(parent._config).get_device_backend_map()
    wanted = BackendConfig(registry.substitute(Backend(backend)))
    for device, name in wanted.get_device_backend_map().items():
        if have.get(device) != name:
            raise ValueError(
                f"backend={backend!r}: the parent group {parent.members.name!r} has "
                f"{parent._config!r}"
            )
