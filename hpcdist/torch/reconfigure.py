"""Lets torch.distributed follow hpcdist's default group when that goes on without dead ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from hpcdist._ops import ReduceOp
from hpcdist.groups import reconfigure
from hpcdist.groups.uninterrupted import Uninterrupted
from hpcdist.groups.world import world
from hpcdist.startup import variables
from hpcdist.torch import buckets, modules
from hpcdist.torch.process_group import BridgeGroup
from hpcdist.torch.rendezvous import open_for_default

_API = "reconfigure"


def register() -> None:
    """Follow each reconfiguration from now on; once is enough."""
    if follow not in reconfigure.followers:
        reconfigure.followers.append(follow)


def follow(ours: Any) -> None:
    """Renew what torch keeps of its default group, and destroy its other groups.

    Its DDP modules over the default group forget the pass that failed: a reducer in C++ keeps the
    number of ranks from the start of a pass to its end, and would divide the next one by it.

    All ranks of the new world must call it: the store on which torch's groups meet is opened
    again, because it may have been a dead rank's.

    Parameters
    ----------
    ours : hpcdist.ProcessGroup
        The default group, reconfigured.
    """
    default = dist.group.WORLD
    if isinstance(default, BridgeGroup) and default.ours is ours:
        if default.renewal is None or default.renewal.generation != ours.members.generation:
            default.renewal = _Renewal(default, ours.members.generation)
        default.renewal.wait()


class _Renewal(Uninterrupted):
    """Renews what torch keeps, once: the other ranks wait for this one.

    Parameters
    ----------
    default : BridgeGroup
        torch's default group.
    generation : int
        How often it has been reconfigured.
    """

    def __init__(self, default: BridgeGroup, generation: int) -> None:
        super().__init__(self._renew)
        self.generation = generation
        self._default = default

    def _renew(self) -> None:
        try:
            _renew(self._default)
        finally:
            world.following = ()  # with an error, too: the next reconfiguration is another one


def _renew(default: BridgeGroup) -> None:
    books: Any = dist.distributed_c10d._world
    for group in reversed(list(books.pg_map)):
        if group is not default:
            dist.destroy_process_group(group)
    ours = default.ours
    for module in modules.over(default):
        module._update_process_group(default)
    buckets.agree(default)
    if world.spares:  # a former spare has made no groups yet: torch counts them for their names
        count = torch.tensor([books.group_count])
        ours.carrier.all_reduce(count, ReduceOp.MAX)
        books.group_count = int(count)
    ranks = list(range(ours.size()))
    books.pg_group_ranks[default] = {rank: rank for rank in ranks}
    store = dist.PrefixStore("default_pg", open_for_default(ours.carrier, ours.timeout, _API))
    variables.export_place(ours.carrier, _API)
    books.pg_map[default] = books.pg_map[default][0], store
    default.meet_elsewhere(store, ours.timeout, ranks)
