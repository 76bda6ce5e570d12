"""Keeps the Work that torch's DDP waits for under ``join(divide_by_initial_world_size=False)``.

``Join.notify_join_context`` starts an all-reduce that counts the ranks which still train. DDP hands
its Work to the reducer in C++ and forgets it. C++ holds only its own part of a Work written in
Python: without the Python part its ``wait`` would never return.
"""

from __future__ import annotations

import functools
from typing import Any
from weakref import WeakKeyDictionary

from torch.distributed.algorithms.join import Join

from hpcdist.torch.work import BridgeWork

#: What takes part in a Join -> the Work of its last step.
_kept: WeakKeyDictionary[Any, BridgeWork] = WeakKeyDictionary()


def register() -> None:
    """Keep such Works from now on; once is enough."""
    notify = Join.notify_join_context
    if getattr(notify, "__module__", None) == __name__:
        return

    @functools.wraps(notify)
    def notify_join_context(joinable: Any) -> Any:
        work = notify(joinable)
        if isinstance(work, BridgeWork):
            _kept[joinable] = work
        return work

    notify_join_context.__module__ = __name__
    Join.notify_join_context = staticmethod(notify_join_context)  # type: ignore[method-assign]
