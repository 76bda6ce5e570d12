"""Lets the reducers of torch's DistributedDataParallel have the same buckets on all ranks.

A reducer makes new buckets before its second pass, in the order that rank 0 tells. A former spare's
reducer is before that, and the others are behind it; or a rank died in between. So each rank keeps
what rank 0 has told it, and the ranks take over what one of them has. They then sum in the same
order as without a death, to the last bit.
"""

# torch's stubs describe the overloads of its C++ class
# mypy: disable-error-code="override"

from __future__ import annotations

import functools
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import Work

from hpcdist.collectives.objects import all_gather_object
from hpcdist.torch.modules import numbered
from hpcdist.torch.process_group import BridgeGroup
from hpcdist.torch.work import FinishedWork

#: Reducer -> what rank 0 has told it last: the parameters' order, and the sizes of the buckets.
_told: WeakKeyDictionary[Any, list[torch.Tensor]] = WeakKeyDictionary()


class _Telling(BridgeGroup):
    """A group that stands for rank 0, and tells a reducer the order that it shall have."""

    def __init__(self, group: Any, order: list[torch.Tensor]) -> None:
        super().__init__(group)
        self._order = list(order)

    def broadcast(self, tensors: Any, opts: Any = None, timeout: Any = None) -> Work:
        tensors[0].copy_(self._order.pop(0))
        return _DONE


_DONE = FinishedWork([])


def note() -> None:
    """Keep what reducers are told from now on; local, and once is enough."""
    rebuild = dist.Reducer._rebuild_buckets
    if getattr(rebuild, "__module__", None) == __name__:
        return

    @functools.wraps(rebuild)
    def _rebuild_buckets(self: Any) -> bool:
        default: Any = dist.group.WORLD
        if not isinstance(default, BridgeGroup):
            return rebuild(self)
        found: list[torch.Tensor] = []
        default.noted = found
        try:
            done = rebuild(self)
        finally:
            default.noted = None
        if len(found) == 2:
            _told[self] = found
        return done

    _rebuild_buckets.__module__ = __name__
    dist.Reducer._rebuild_buckets = _rebuild_buckets  # type: ignore[method-assign]


def agree(group: BridgeGroup) -> None:
    """Let the modules over the default group have the same buckets; all its ranks must call it.

    Parameters
    ----------
    group : BridgeGroup
        torch's default group. The modules over it have forgotten their last pass.
    """
    modules = {
        mine: module
        for mine, module in sorted(numbered.items())
        if vars(module).get("process_group") is group and hasattr(module, "reducer")
    }
    own = {mine: _told.get(module.reducer) for mine, module in modules.items()}
    everyone: list[Any] = [None] * group.ours.size()
    all_gather_object(everyone, own, group.ours)
    for mine, module in modules.items():
        told = next((each[mine] for each in everyone if each.get(mine) is not None), None)
        if told is not None:
            _tell(module, group, told)
        module.require_forward_param_sync = True  # as at first


def _tell(module: Any, group: BridgeGroup, order: list[torch.Tensor]) -> None:
    """Let a module's reducer make its buckets as rank 0's; local."""
    reducer, telling = module.reducer, _Telling(group.ours, order)
    reducer._update_process_group(telling)  # C++ does not keep its Python part
    try:
        reducer._push_all_rebuilt_params()  # else it would make none
        reducer._rebuild_buckets()
    finally:
        module._update_process_group(group)
    _told[reducer] = order
