"""Lets torch.distributed follow hpcdist's default group when that goes on without dead ranks."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from hpcdist.groups import reconfigure
from hpcdist.startup import variables
from hpcdist.torch.process_group import BridgeGroup
from hpcdist.torch.rendezvous import open_store
from hpcdist.torch.store import to_torch

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
        _apart(lambda: _renew(default))


def _renew(default: BridgeGroup) -> None:
    books: Any = dist.distributed_c10d._world
    for group in reversed(list(books.pg_map)):
        if group is not default:
            dist.destroy_process_group(group)
    for module in _modules_over(default):
        module._update_process_group(default)
    ours = default.ours
    ranks = list(range(ours.size()))
    books.pg_group_ranks[default] = {rank: rank for rank in ranks}
    store = dist.PrefixStore("default_pg", to_torch(open_store(ours.carrier, ours.timeout, _API)))
    variables.export_place(ours.carrier, _API)
    books.pg_map[default] = books.pg_map[default][0], store
    default.meet_elsewhere(store, ours.timeout, ranks)


def _modules_over(group: BridgeGroup) -> Iterator[Any]:
    """Find torch's DDP modules over a group; torch has no list of them."""
    for found in gc.get_objects():
        if issubclass(type(found), DistributedDataParallel):
            if vars(found).get("process_group") is group:
                yield found


def _apart(work: Callable[[], None]) -> None:
    """Do something in a thread, where no signal handler raises; what one raises here comes after.

    The other ranks have been told that this one goes on, and wait for it.
    """
    raised: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, name="hpcdist-reconfigure", daemon=True)
    thread.start()
    while thread.is_alive():
        try:
            thread.join()
        except BaseException as error:
            raised.append(error)
    if raised:
        raise raised[0]
