"""Makes new groups from ranks of existing ones.

Only the members of a group take part in its creation (MPI_Comm_create_group). Other processes may
call these functions too, as programs written for torch do; they return at once.
"""

from __future__ import annotations

import operator
from array import array
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

from hpcdist.backends import cuda, registry
from hpcdist.backends.base import BackendOptions
from hpcdist.backends.create import create
from hpcdist.backends.registry import Backend, BackendConfig
from hpcdist.groups import state as _group
from hpcdist.groups.state import GroupMember, ProcessGroup
from hpcdist.store.prefix import prefixed

__all__ = ["new_group", "new_subgroups", "new_subgroups_by_enumeration", "split_group"]


def new_group(
    ranks: Iterable[int] | None = None,
    timeout: timedelta | None = None,
    backend: str | None = None,
    pg_options: Any = None,
    use_local_synchronization: bool = False,
    group_desc: str | None = None,
    device_id: Any = None,
    sort_ranks: bool = True,
) -> Any:
    """Make a group of some ranks of the world.

    All members must call it; other processes may. Members of several groups must make them in the
    same order.

    Parameters
    ----------
    ranks : iterable of int, optional
        Ranks of the world, the same on all members; None means all.
    timeout : datetime.timedelta, optional
        After this long a missing peer is an error, here and in the group's operations. None means
        the world's timeout.
    backend : str, optional
        Backend of the group; None means the world's.
    pg_options : object, optional
        Options of the backend: :class:`hpcdist.MPIOptions`.
    use_local_synchronization : bool
        Accepted for compatibility with torch: only the members ever make a group.
    group_desc : str, optional
        Description, for messages.
    device_id : torch.device, int or str, optional
        GPU this process uses: a group over NCCL then creates its communicator now. Either all
        members give one, or none.
    sort_ranks : bool
        Number the members by their rank in the world; False numbers them in the order of `ranks`.

    Returns
    -------
    ProcessGroup or GroupMember.NON_GROUP_MEMBER
        The latter on processes outside the group.

    Raises
    ------
    ValueError
        If a rank is out of range or named twice, or there is no default group.
    TypeError
        If an argument is of the wrong type.
    DistTimeoutError
        If a member does not come within the timeout.
    DistMismatchError
        If members gave different ranks.

    Notes
    -----
    A failed call does not count: a late member makes the group with the others' next call for the
    same ranks. Source: ``torch.distributed.new_group``.
    """
    parent = _group._get_default_group()
    members = tuple(parent._ranks) if ranks is None else _members(ranks, parent)
    if sort_ranks:
        members = tuple(sorted(members))
    # checked on all processes, so that all of them raise the error
    limit = _timeout(timeout, parent)
    if parent._comm.rank not in members:
        return GroupMember.NON_GROUP_MEMBER
    divides = len(members) == len(parent._ranks)
    return make(parent, members, limit, backend, pg_options, group_desc, divides, None, device_id)


def part_of_world(
    members: Sequence[int],
    timeout: timedelta | None,
    backend: str | None,
    pg_options: Any,
    description: str | None,
    divides: bool,
) -> Any:
    """Make one of several groups that some ranks of the world make at once; all, with `divides`.

    The order of `members` gives the ranks in the group. See :func:`new_group`.
    """
    parent = _group._get_default_group()
    limit = _timeout(timeout, parent)
    if parent._comm.rank not in members:
        return GroupMember.NON_GROUP_MEMBER
    return make(parent, tuple(members), limit, backend, pg_options, description, divides)


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
    timeout : datetime.timedelta, optional
        See :func:`new_group`.
    backend : str, optional
        See :func:`new_group`.
    pg_options : object, optional
        See :func:`new_group`.
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
        If a member does not come within the timeout.

    Notes
    -----
    Source: ``torch.distributed.new_subgroups``, where None means the number of CUDA devices.
    """
    pg = _group.member(group)
    world_ranks = pg._ranks
    if group_size is None:
        divided = _by_node(pg)
    else:
        group_size = operator.index(group_size)
        if group_size <= 0 or len(world_ranks) % group_size:
            raise ValueError(
                f"group_size={group_size} does not divide the {len(world_ranks)} ranks of the "
                f"group {pg._name!r}"
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
    timeout : datetime.timedelta, optional
        See :func:`new_group`.
    backend : str, optional
        See :func:`new_group`.
    pg_options : object, optional
        See :func:`new_group`.
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
        If a member does not come within the timeout.

    Notes
    -----
    Source: ``torch.distributed.new_subgroups_by_enumeration``.
    """
    parent = _group._get_default_group()
    divided = [_members(ranks, parent) for ranks in ranks_per_subgroup_list or ()]
    if not divided:
        raise ValueError("ranks_per_subgroup_list must hold at least one list of ranks")
    _disjoint(divided, "ranks_per_subgroup_list")
    own = None
    made: list[Any] = []
    divides = sum(map(len, divided)) == len(parent._ranks)
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
        If a member does not come within the timeout.

    Notes
    -----
    Source: ``torch.distributed.split_group``.
    """
    parent = _group.member(parent_pg)
    if not split_ranks:
        raise ValueError("split_ranks must hold at least one list of the parent's ranks")
    size = len(parent._ranks)
    where = f"group {parent._name!r}"
    divided = [tuple(sorted(checked(ranks, size, where))) for ranks in split_ranks]
    if not all(divided):
        raise ValueError("a list in split_ranks is empty")
    _disjoint(divided, "split_ranks")
    if backend is not None:
        _check_kept(backend, parent)
    limit = _timeout(timeout, parent)
    if group_desc is None:
        group_desc = parent._description + ":split"
    own = parent._comm.rank
    divides = sum(map(len, divided)) == size
    for ranks in divided:
        if own in ranks:
            return make(parent, ranks, limit, backend, pg_options, group_desc, divides)
    return None


def make(
    parent: ProcessGroup,
    ranks: tuple[int, ...],
    timeout: timedelta,
    backend: str | None,
    pg_options: Any,
    description: str | None,
    divides: bool = False,
    shrinks: int | None = None,
    device_id: Any = None,
) -> ProcessGroup:
    """Make and register a group of `ranks` of `parent`; only members call it.

    With `divides` all ranks of the parent make their groups in this very call.
    """
    asked = Backend(backend or parent._backend)
    kind = registry.substitute(asked)
    registry.log_substitute(asked, kind, parent._ranks[parent._comm.rank])
    config = BackendConfig(kind) if backend else BackendConfig(parent._config)
    world_ranks = tuple(parent._ranks[rank] for rank in ranks)
    # a backend makes subgroups from a parent of its own kind (over MPI that is the host's backend,
    # also for a group of CUDA tensors alone)
    kin = {
        name: parent._backends["cpu" if name == Backend.MPI else device]
        for device, name in BackendConfig(parent._config).get_device_backend_map().items()
    }
    name = _group.new_name(world_ranks)
    backends = create(
        config,
        BackendOptions(
            store=prefixed(_group.world.store, f"group/{name}"),
            group_rank=ranks.index(parent._comm.rank),
            group_size=len(ranks),
            timeout=timeout,
            group_id=name,
            global_ranks_in_group=world_ranks,
            parent_ranks=ranks,
            divides=divides,
            shrinks=shrinks,
            device=cuda.device_index(device_id),
        ),
        pg_options,
        kin,
    )
    pg = ProcessGroup(backends, world_ranks, name, description or "undefined", kind, repr(config))
    _group.add(pg)
    return pg


def _by_node(pg: ProcessGroup) -> list[tuple[int, ...]]:
    """World ranks per node; the nodes in order of their first ranks."""
    first = array("q", [min(pg._comm.node_ranks)])
    firsts = array("q", [0]) * len(pg._ranks)
    pg._comm.all_gather_into_tensor(firsts, first, False, api="new_subgroups")
    nodes: dict[int, list[int]] = {}
    for rank, leader in zip(pg._ranks, firsts, strict=True):
        nodes.setdefault(leader, []).append(rank)
    return [tuple(nodes[leader]) for leader in sorted(nodes)]


def _members(ranks: Iterable[int], parent: ProcessGroup) -> tuple[int, ...]:
    return checked(ranks, len(parent._ranks), "world")


def checked(ranks: Iterable[int], size: int, where: str) -> tuple[int, ...]:
    """Return ranks as a tuple of distinct numbers below size."""
    try:
        members = tuple(operator.index(rank) for rank in ranks)
    except TypeError:
        raise TypeError(f"ranks must be whole numbers in a list, not {ranks!r}") from None
    for rank in members:
        if not 0 <= rank < size:
            raise ValueError(
                f"rank {rank} is outside the {where} of size {size}: ranks are 0 to {size - 1}"
            )
    if len(set(members)) != len(members):
        raise ValueError(f"a rank is named twice in {list(members)}")
    return members


def _disjoint(divided: list[tuple[int, ...]], what: str) -> None:
    seen: dict[int, tuple[int, ...]] = {}
    for ranks in divided:
        for rank in ranks:
            if rank in seen:
                raise ValueError(
                    f"{what}: rank {rank} is in both {list(seen[rank])} and {list(ranks)}"
                )
            seen[rank] = ranks


def _timeout(timeout: timedelta | None, parent: ProcessGroup) -> timedelta:
    """Return the given timeout, else the parent's."""
    if timeout is None:
        return parent.timeout
    if not isinstance(timeout, timedelta):
        raise TypeError(f"timeout must be a datetime.timedelta, not {timeout!r}")
    if timeout <= timedelta(0):
        raise ValueError(f"timeout must be positive, not {timeout}")
    return timeout


def _check_kept(backend: str, parent: ProcessGroup) -> None:
    """Raise ValueError unless the parent has this backend for these devices."""
    have = BackendConfig(parent._config).get_device_backend_map()
    wanted = BackendConfig(registry.substitute(Backend(backend)))
    for device, name in wanted.get_device_backend_map().items():
        if have.get(device) != name:
            raise ValueError(
                f"backend={backend!r}: the parent group {parent._name!r} has {parent._config!r}"
            )
