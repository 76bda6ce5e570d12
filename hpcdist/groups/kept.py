"""What becomes of the other groups when the default group is renewed: lost, or kept.

A group that is kept has the ranks of its members that live, and waits to be made again: see
:mod:`hpcdist.groups.rebuild`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from hpcdist.backends.carrier import Carrier
from hpcdist.backends.create import renewed
from hpcdist.errors import DistBackendError
from hpcdist.groups.members import Members
from hpcdist.groups.world import Absent, world

#: Called with the default group and, by new rank, the former ones, or None where the other groups
#: are lost: what else keeps ranks, and needs no communication to renew them. Called again, and has
#: nothing to do then, where a signal handler raised.
renumbering: list[Callable[[Any, Sequence[int] | None], None]] = []


@dataclass
class Kept:
    """What a group that is made again must have of the former one.

    Attributes
    ----------
    backends : dict
        Device type to backend; their communicator is of no use any more.
    timeout : float
        Seconds.
    check, node_limit : int
        As of :class:`~hpcdist._engine.Comm`.
    generation : int
        Of the default group by whose ranks its members are numbered.
    """

    backends: dict[str, Any]
    timeout: float
    check: int
    node_limit: int
    generation: int


def lose(group: Any, why: str, old: list[Any]) -> None:
    """Let a group be as if destroyed; `old` gets its backends, which are still to be freed."""
    old.extend(reversed(group._backends.values()))
    group.carrier = cast(Carrier, Absent(f"the process group {group.members.name!r} {why}"))
    group._backends = {}
    group.hooks.clear()
    world.kept.pop(group, None)
    world.groups.pop(group, None)
    world.held.discard(group)


def keep_all(pg: Any, places: Sequence[int] | None, old: list[Any]) -> None:
    """Let all groups but the default one wait to be made again, or be lost.

    Also repeatedly, where a signal handler raised.

    Parameters
    ----------
    pg : ProcessGroup
        The default group, as it is now.
    places : sequence of int or None
        By new rank, the former one; None: the groups are lost.
    old : list
        Gets their backends, which are still to be freed.
    """
    for group in reversed(list(world.groups)):
        if group is not pg and places is not None:
            _keep(group, places, pg.members.generation, old)
        elif group is not pg:
            lose(group, "was lost when the default group was reconfigured: make it again", old)
    for each in renumbering:
        each(pg, places)


def _keep(group: Any, places: Sequence[int], generation: int, old: list[Any]) -> None:
    kept = world.kept.get(group)
    if kept is None:
        native = group.carrier.native
        try:
            renewed(group._backends, native)
        except DistBackendError as error:
            lose(group, f"was lost when the default group was reconfigured: {error}", old)
            return
        kept = Kept(
            dict(group._backends), native.timeout, native.check, native.node_limit, generation - 1
        )
        world.kept[group] = kept
    if kept.generation != generation:
        new = {place: rank for rank, place in enumerate(places)}
        former = group.members
        ranks = tuple(new[rank] for rank in former.ranks if rank in new)
        members = Members(ranks, former.name, former.generation + 1)
        group.members, kept.generation = members, generation
    old.extend(reversed(group._backends.values()))
    why = f"the process group {group.members.name!r} has not been made again yet"
    group.carrier, group._backends = cast(Carrier, Absent(why)), {}
