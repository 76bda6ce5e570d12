"""Whether torch numbers the processes as hpcdist does: all that make a group decide together.

Where torch's default group is another backend's, its ranks may be other processes than MPI's. Roots
and peers would be others then, without an error.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from hpcdist.backends.refusal import refusing
from hpcdist.errors import DistTimeoutError
from hpcdist.groups import joining
from hpcdist.groups.process_group import ProcessGroup


def compare(
    whole: ProcessGroup, store: Any, ranks: Sequence[int], rank: int, limit: timedelta
) -> None:
    """Refuse a group of torch's on all its members if one has another rank in hpcdist.

    Its members call it, and no other rank; they may be other processes than hpcdist's ranks of the
    same numbers, so they agree through torch's store.

    Parameters
    ----------
    whole : ProcessGroup
        hpcdist's default group.
    store : torch.distributed.Store
        The same for all members.
    ranks : sequence of int
        The members' ranks in torch's world.
    rank : int
        Which of them this process is.
    limit : datetime.timedelta
        For the others to come.

    Raises
    ------
    ValueError
        On all members.
    """
    # torch's world: these ranks, while it makes its default group
    size = len(ranks) if dist.group.WORLD is None else dist.get_world_size()
    problem = _problem(whole, ranks[rank], size)
    if not joining.is_closed(whole):  # the others made their groups before
        problem = _of_all(store, ranks, problem, limit)
    if problem:
        raise ValueError(problem)


def compare_members(whole: ProcessGroup, ours: ProcessGroup, api: str) -> None:
    """Refuse a group of hpcdist's on all its members if one has another rank in torch.

    All its members must call it.

    Parameters
    ----------
    whole, ours : ProcessGroup
        hpcdist's default group, and this one.
    api : str
        The public function, for messages.

    Raises
    ------
    ValueError
        On a member that has another rank; the others get the reason in a DistMismatchError.
    """
    with refusing(ours.carrier, api):
        if problem := _problem(whole, dist.get_rank(), dist.get_world_size()):
            raise ValueError(problem)
    ours.carrier.barrier(api=api)


def _problem(whole: ProcessGroup, rank: int, size: int) -> str:
    if (rank, size) == (whole.rank(), whole.size()):
        return ""
    return (
        f"torch says rank {rank} of {size}, but hpcdist's default group, which exists already, "
        f"says {whole.rank()} of {whole.size()}"
    )


def _of_all(store: Any, ranks: Sequence[int], own: str, limit: timedelta) -> str:
    """Return this member's problem, else another one's, "" if none has one; all wait for all."""
    digest = hashlib.blake2b(repr(list(ranks)).encode(), digest_size=8).hexdigest()
    place = dist.PrefixStore(f"hpcdist/places/{digest}", store)
    size = len(ranks)
    # the same ranks may make several groups; no member begins with the next one before all have
    # come to this one
    turn = (place.add("came", 1) - 1) // size
    if own:
        place.set(f"problem/{turn}", own)
    if place.add(f"looked/{turn}", 1) == size:
        place.set(f"all/{turn}", "")
    try:
        place.wait([f"all/{turn}"], limit)
    except RuntimeError as error:
        raise DistTimeoutError(
            f"not all of torch's ranks {list(ranks)} came to make their group within "
            f"{limit.total_seconds():g} s"
        ) from error
    if own or not place.check([f"problem/{turn}"]):
        return own
    return f"another rank of this group cannot make it: {place.get(f'problem/{turn}').decode()}"
