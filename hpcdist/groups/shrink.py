"""Makes a group of the ranks that remain of another one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hpcdist import _engine
from hpcdist.groups import state as _group
from hpcdist.groups.new_group import checked, make
from hpcdist.groups.resolve import member
from hpcdist.groups.state import ProcessGroup

#: Flags of :func:`shrink_group`.
SHRINK_DEFAULT, SHRINK_ABORT = 0, 1


def shrink_group(
    ranks_to_exclude: Sequence[int],
    group: ProcessGroup | None = None,
    shrink_flags: int = SHRINK_DEFAULT,
    pg_options: Any = None,
) -> ProcessGroup:
    """Make a group without some ranks, for instance without failed ones.

    All remaining ranks must call it; the excluded ranks must not.

    Parameters
    ----------
    ranks_to_exclude : sequence of int
        Ranks of `group` to exclude.
    group : ProcessGroup, optional
        What to shrink; None means the default group. It is not changed.
    shrink_flags : int
        0, or 1 (``hpcdist.groups.shrink.SHRINK_ABORT``) to first abort what is in flight in `group`
        over NCCL, because an excluded rank has failed; `group` cannot be used over NCCL afterwards.
    pg_options : object, optional
        See :func:`new_group`.

    Returns
    -------
    ProcessGroup
        The remaining ranks, in their order, with the backends of `group`.

    Raises
    ------
    ValueError
        If no rank or every rank is excluded, or one is out of range or named twice, or the flags
        are unknown.
    RuntimeError
        If this rank is excluded.
    DistTimeoutError
        If a remaining rank does not call within the group's timeout.

    Notes
    -----
    Where ranks of the job have died and it goes on without them (``HPCDIST_FT=1``), this is
    :meth:`ProcessGroup.reconfigure` of the default group, for the ranks that died: it changes that
    group and returns it. Over NCCL 2.27 and newer its communicator is made from that of `group`
    (``ncclCommShrink``). Source: ``torch.distributed.shrink_group``, which destroys the old group,
    and where that is the default group all others too, and renumbers the world.
    """
    parent = member(group)
    gone_for_good = _lost(parent)
    if shrink_flags not in (SHRINK_DEFAULT, SHRINK_ABORT):
        raise ValueError(
            f"Invalid shrink_flags value: {shrink_flags!r}. Must be one of: SHRINK_DEFAULT "
            f"({SHRINK_DEFAULT}) or SHRINK_ABORT ({SHRINK_ABORT})"
        )
    size = len(parent.members.ranks)
    gone = checked(ranks_to_exclude, size, f"group {parent.members.name!r}")
    left = tuple(rank for rank in range(size) if rank not in gone)
    if not gone:
        raise ValueError("ranks_to_exclude cannot be empty: name the ranks to leave out")
    if not left:
        raise ValueError(
            f"ranks_to_exclude names all {size} ranks of the group {parent.members.name!r}"
        )
    if parent.carrier.rank in gone:
        raise RuntimeError(
            f"rank {parent.carrier.rank} of the group {parent.members.name!r} is one of those that "
            "are left out: only the others call shrink_group"
        )
    if gone_for_good:
        return _go_on(parent, gone, gone_for_good)
    return make(
        parent,
        left,
        parent.timeout,
        None,
        pg_options,
        f"{parent._description}:shrunken",
        shrinks=shrink_flags,
    )


def _lost(parent: ProcessGroup) -> tuple[int, ...]:
    """Return the world's ranks that died, in a job that goes on."""
    comm = parent.carrier.native
    if comm is not None and _engine.tolerates_failures(comm):
        return _engine.lost_ranks(comm)
    return ()


def _go_on(parent: ProcessGroup, gone: Sequence[int], lost: tuple[int, ...]) -> ProcessGroup:
    if parent is not _group.world.pg:
        raise ValueError(
            f"ranks {lost} of the world died: shrink the default group first, which destroys all "
            f"others, then make {parent.members.name!r} again"
        )
    missed, alive = sorted(set(lost) - set(gone)), sorted(set(gone) - set(lost))
    if missed or alive:
        problem = f"rank {missed[0]} died too" if missed else f"rank {alive[0]} lives"
        raise ValueError(
            f"ranks_to_exclude is {sorted(gone)}, but {problem}: exclude the ranks that died, "
            f"{list(lost)} as far as this process knows, or call reconfigure(), which finds them"
        )
    parent.reconfigure()
    return parent
