"""Numbers torch's DistributedDataParallel modules, in jobs that go on after a death.

A program makes them in the same order on all ranks, so a number means the same module everywhere.
It is known which one is being made, too.
"""

from __future__ import annotations

import functools
import itertools
import threading
from typing import Any
from weakref import WeakValueDictionary

from torch.nn.parallel import DistributedDataParallel

#: Modules by number, in the order in which they were made.
numbered: WeakValueDictionary[int, Any] = WeakValueDictionary()
_numbers = itertools.count()
_making = threading.local()


def being_made() -> Any:
    """Return the module whose constructor runs in this thread, or None; local."""
    return getattr(_making, "module", None)


def number() -> None:
    """Number modules from now on; local, and once is enough."""
    make = DistributedDataParallel.__init__
    if getattr(make, "__module__", None) == __name__:
        return

    @functools.wraps(make)
    def __init__(self: Any, *arguments: Any, **named: Any) -> None:
        before, mine = being_made(), next(_numbers)
        _making.module = self
        try:
            make(self, *arguments, **named)
        finally:
            _making.module = before
        numbered[mine] = self

    __init__.__module__ = __name__
    DistributedDataParallel.__init__ = __init__  # type: ignore[method-assign]
