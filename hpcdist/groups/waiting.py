"""Groups that a former spare makes before it has joined the others.

They have their name and ranks at once, and wait for their communicators like the groups of the
other ranks, which a recovery has kept: all are made together, in :mod:`hpcdist.groups.rebuild`.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, cast

from hpcdist.backends import mpi
from hpcdist.backends.carrier import Carrier
from hpcdist.backends.registry import Backend, BackendConfig
from hpcdist.groups import joining
from hpcdist.groups.kept import Kept
from hpcdist.groups.process_group import ProcessGroup
from hpcdist.groups.state import count, new_name
from hpcdist.groups.world import world


class Waiting(joining.Joining):
    """Stands for the communicator of such a group: it answers, and moves no data."""

    def __init__(self, rank: int, ranks: tuple[int, ...], timeout: float, check: int) -> None:
        default = world.joining
        super().__init__(default._real, rank, len(ranks), default.places, default.rebuilds)
        self.number = default.number
        self.timeout, self.check = timeout, check
        self._ranks = ranks

    @property
    def node_ranks(self) -> tuple[int, ...]:
        """Ranks of the group on this node."""
        here = world.joining.node_ranks
        return tuple(i for i, each in enumerate(self._ranks) if each in here)

    @property
    def local_rank(self) -> int:
        """Index of this rank among them."""
        return self.node_ranks.index(self.rank)


def make(
    parent: ProcessGroup,
    ranks: tuple[int, ...],
    timeout: timedelta,
    config: BackendConfig,
    pg_options: Any,
    about: tuple[str, str, str],
) -> ProcessGroup:
    """Make and register a group of world ranks, among them this one; local.

    Raises
    ------
    DistError
        If the other ranks do not make their groups again, or the group is not over MPI alone.
    """
    default = world.joining
    if not default.rebuilds:
        joining.refuse(parent, "new_group", ". To make groups, give State rebuild=True")
    if set(config.get_device_backend_map().values()) != {Backend.MPI}:
        joining.refuse(parent, "new_group", ". Groups that are not over MPI are not made again")
    name = new_name(ranks)
    seconds = timeout.total_seconds()
    stand = Waiting(
        ranks.index(default.rank), ranks, seconds, mpi.level(pg_options, parent.carrier.check)
    )
    pg = ProcessGroup({"cpu": stand}, ranks, name, *about)
    pg.carrier, pg._backends = cast(Carrier, stand), {}
    backends, native = world.pg._backends, default._real.native
    generation = world.pg.members.generation
    world.kept[pg] = Kept(dict(backends), seconds, stand.check, native.node_limit, generation)
    world.groups[pg] = None
    count(world.counts, ranks, name)
    return pg
