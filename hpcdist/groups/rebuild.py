"""Makes the groups again that a recovery has kept, from those of their members that live.

The ranks tell each other which groups they have, and make them in the same turns. Groups without a
member in common are made in one turn, by one call of MPI that all ranks of the default group make.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hpcdist import _engine, log
from hpcdist.backends.create import renewed
from hpcdist.errors import DistBackendError
from hpcdist.groups.kept import lose
from hpcdist.groups.uninterrupted import Uninterrupted
from hpcdist.groups.world import world

_log = log.get_logger("group")

#: A group's name and ranks: it is the same group on all ranks where these are.
Key = tuple[str, tuple[int, ...]]


@dataclass
class Plan:
    """What the ranks do together.

    Attributes
    ----------
    turns : list of list
        Groups that are made together: no rank is in two of them.
    lost : dict
        Why a group is not made.
    taken : dict
        As ``world.taken``.
    """

    turns: list[list[Key]] = field(default_factory=list)
    lost: dict[Key, str] = field(default_factory=dict)
    taken: dict[str, int] = field(default_factory=dict)


def plan(told: Sequence[Sequence[Key]]) -> Plan:
    """Decide what is made; the same on all ranks.

    Parameters
    ----------
    told : sequence
        By rank, its groups in the order in which they were made.

    Returns
    -------
    Plan
        A group that one of its members has no more is lost on the others, too.
    """
    having: dict[Key, list[int]] = {}
    for rank, groups in enumerate(told):
        for key in groups:
            having.setdefault(key, []).append(rank)
    found = Plan()
    for key, ranks in having.items():
        without = sorted(set(key[1]) - set(ranks))
        if without:
            whose = f"rank {without[0]} has destroyed it, or dropped all references to it"
            if world.spares:
                whose += ", or was a spare and has not made it before its State"
            found.lost[key] = whose
            continue
        if len(ranks) != len(key[1]):
            found.lost[key] = "two groups have its name and its ranks"
            continue
        free = (t for t in found.turns if not any(set(key[1]) & set(other[1]) for other in t))
        turn = next(free, None)
        if turn is None:
            found.turns.append(turn := [])
        turn.append(key)
        text, _, number = key[0].rpartition("#")
        if number.isdecimal():
            found.taken[text] = max(found.taken.get(text, 0), int(number))
    return found


def attempt(pg: Any) -> bool:
    """Make the kept groups again; all ranks of the default group must call it.

    Not in a thread in which signal handlers run: all ranks go through the same calls.

    Parameters
    ----------
    pg : ProcessGroup
        The default group.

    Returns
    -------
    bool
        False on all ranks if one has died: the groups wait for the next recovery.
    """
    comm = pg.carrier.native
    own = [((g.members.name, g.members.ranks), g) for g in list(world.groups) if g in world.kept]
    mine = dict(own)
    told = _engine.exchange(comm, json.dumps([key for key, _ in own]).encode())
    if told is None:
        return False
    found = plan([[(name, tuple(ranks)) for name, ranks in json.loads(each)] for each in told])
    made: dict[Key, Any] = {}
    for turn in found.turns:
        if not _make(comm, turn, mine, made, found.lost):
            for new in made.values():
                new.free(0.0, agree=False)
            return False
    for key, new in made.items():
        _connect(mine[key], new)
    for key, why in found.lost.items():
        if comm.rank == 0:
            _log.warning("the process group %r is not made again: %s", key[0], why)
        for group in [group for having, group in own if having == key]:
            lose(group, f"was not made again after a recovery: {why}", [])
    world.counts, world.taken = {}, found.taken
    if comm.rank == 0 and found.turns:
        _log.info("%d groups were made again", sum(map(len, found.turns)))
    return True


def _make(
    comm: _engine.Comm,
    turn: list[Key],
    mine: dict[Key, Any],
    made: dict[Key, Any],
    lost: dict[Key, str],
) -> bool:
    """Make the groups of one turn; False if a rank has died."""
    own = next((key for key in turn if comm.rank in key[1]), None)
    new: list[_engine.Comm] = []
    try:
        if own is None:
            return _engine.remake(comm, (), "", comm.timeout, comm.check, new)
        kept = world.kept[mine[own]]
        if not _engine.remake(comm, own[1], own[0], kept.timeout, kept.check, new):
            return False
        new[0].node_limit = kept.node_limit
        made[own] = new[0]
    except DistBackendError as error:
        lost.update(dict.fromkeys(turn, str(error)))
    return True


def _connect(group: Any, new: _engine.Comm) -> None:
    backends = renewed(world.kept[group].backends, new)
    carrier = group.hooks.carry(backends)
    group._backends, group.carrier = backends, carrier
    world.kept.pop(group)


class _Died(Exception):
    """A rank has died; this one may not have heard of it in another way yet."""


def with_spares(pg: Any) -> bool:
    """Make the kept groups again where former spares join; all ranks must call it.

    Returns
    -------
    bool
        False on all ranks if one has died: the groups wait for the next recovery.

    Raises
    ------
    DistTimeoutError
        If a rank does not call within the timeout: a former spare that is still to make its groups.
    """

    def stop() -> None:
        raise _Died

    rebuilding = world.rebuilding = world.rebuilding or Rebuilding(pg, stop, meets=True)
    try:
        rebuilding.wait()
    except _Died:
        return False
    finally:
        if rebuilding.is_over:
            world.rebuilding = None
    return True


class Rebuilding(Uninterrupted):
    """Makes the groups again in a thread: the others wait.

    Parameters
    ----------
    pg : ProcessGroup
        The default group.
    recover : callable
        Repeats the recovery, because another rank has died; or raises.
    broken : bool
        Whether it must do so first.
    meets : bool
        Whether to wait until all ranks are here, because former spares come late: MPI's calls
        expect all ranks.
    """

    def __init__(
        self, pg: Any, recover: Callable[[], None], broken: bool = False, meets: bool = False
    ) -> None:
        super().__init__(self._rebuild)
        self._pg, self._recover = pg, recover
        self._broken, self._meets = broken, meets

    def next(self) -> Rebuilding:
        """Return one that goes on where this one has failed."""
        return Rebuilding(self._pg, self._recover, self._broken)

    def _rebuild(self) -> None:
        if self._meets:
            comm = self._pg.carrier.native
            _engine.agree(comm, 1, comm.timeout)
        while self._broken or not attempt(self._pg):
            self._broken = True
            self._recover()
            self._broken = False
