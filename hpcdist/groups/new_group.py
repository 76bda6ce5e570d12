"""Makes a new group from ranks of an existing one.

Only the members of a group take part in its creation (MPI_Comm_create_group). Other processes may
call these functions too, as programs written for torch do; they return at once.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any, cast

from hpcdist.backends import cuda, registry
from hpcdist.backends.base import BackendOptions
from hpcdist.backends.create import create
from hpcdist.backends.registry import Backend, BackendConfig
from hpcdist.groups import joining, waiting
from hpcdist.groups import state as _group
from hpcdist.groups.dropped import free_dropped
from hpcdist.groups.limits import seconds_of
from hpcdist.groups.resolve import default_group
from hpcdist.groups.state import GroupMember, ProcessGroup
from hpcdist.groups.turns import turn
from hpcdist.store.prefix import prefixed


def new_group(
    ranks: Iterable[int] | None = None,
    timeout: timedelta | None = None,
    backend: str | None = None,
    pg_options: Any = None,
    use_local_synchronization: bool = False,
    group_desc: str | None = None,
    device_id: Any = None,
    sort_ranks: bool = True,
) -> ProcessGroup:
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
        The latter on processes outside the group; type checkers see a ProcessGroup.

    Raises
    ------
    ValueError
        If a rank is out of range or named twice, or there is no default group.
    TypeError
        If an argument is of the wrong type.
    DistTimeoutError
        If a member does not arrive within the timeout.
    DistMismatchError
        If members gave different ranks.

    Notes
    -----
    A failed call does not count: a late member makes the group with the others' next call for the
    same ranks. Source: ``torch.distributed.new_group``.
    """
    parent = default_group()
    members = (
        tuple(parent.members.ranks)
        if ranks is None
        else checked(ranks, len(parent.members.ranks), "world")
    )
    if sort_ranks:
        members = tuple(sorted(members))
    # checked on all processes, so that all of them raise the error
    limit = time_limit(timeout, parent)
    if parent.carrier.rank not in members:
        return cast(ProcessGroup, GroupMember.NON_GROUP_MEMBER)
    divides = len(members) == len(parent.members.ranks)
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
    parent = default_group()
    limit = time_limit(timeout, parent)
    if parent.carrier.rank not in members:
        return GroupMember.NON_GROUP_MEMBER
    return make(parent, tuple(members), limit, backend, pg_options, description, divides)


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
    registry.log_substitute(asked, kind, parent.members.ranks[parent.carrier.rank])
    config = BackendConfig(kind) if backend else BackendConfig(parent._config)
    world_ranks = tuple(parent.members.ranks[rank] for rank in ranks)
    about = (description or "undefined", kind, repr(config))
    if joining.is_closed(default_group()):
        return waiting.make(parent, world_ranks, timeout, config, pg_options, about)
    # a backend makes subgroups from a parent of its own kind (over MPI that is the host's backend,
    # also for a group of CUDA tensors alone)
    kin = {
        name: parent._backends["cpu" if name == Backend.MPI else device]
        for device, name in BackendConfig(parent._config).get_device_backend_map().items()
    }
    device = cuda.device_index(device_id)
    free_dropped()
    end = time.monotonic() + timeout.total_seconds()
    with turn(world_ranks, end):
        counts = _group.world.counts  # another thread may reconfigure the world meanwhile
        name = _group.new_name(world_ranks)
        options = BackendOptions(
            store=prefixed(_group.world.store, f"group/{name}"),
            group_rank=ranks.index(parent.carrier.rank),
            group_size=len(ranks),
            timeout=timeout,
            group_id=name,
            global_ranks_in_group=world_ranks,
            parent_ranks=ranks,
            divides=divides,
            shrinks=shrinks,
            device=device,
            end=end,
        )
        pg: ProcessGroup | None = None
        try:
            backends = create(config, options, pg_options, kin)
            pg = ProcessGroup(backends, world_ranks, name, *about)
            _group.add(pg)
        finally:
            # the others may have their group, whatever a handler raised here
            if pg is not None or options.met:
                _group.count(counts, world_ranks, name)
    return pg


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


def time_limit(timeout: timedelta | None, parent: ProcessGroup) -> timedelta:
    """Return the given timeout, else the parent's."""
    if timeout is None:
        return parent.timeout
    seconds_of(timeout)
    return timeout
