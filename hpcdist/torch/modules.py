"""Knows torch's DistributedDataParallel modules, in jobs that go on after a death.

A program makes them in the same order on all ranks, so a number means the same module everywhere.
It is known which one is being made, too. Copies and unpickled ones are known without a number: one
rank alone may make them.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

from torch.nn.parallel import DistributedDataParallel

#: Modules by number, in the order in which they were made.
numbered: WeakValueDictionary[int, Any] = WeakValueDictionary()
#: All modules by identity.
_all: WeakValueDictionary[int, Any] = WeakValueDictionary()
_numbers = itertools.count()
_making = threading.local()


def being_made() -> Any:
    """Return the module whose constructor runs in this thread, or None; local."""
    return getattr(_making, "module", None)


def over(group: Any) -> list[Any]:
    """Return the modules over a group; local.

    Parameters
    ----------
    group : torch.distributed.ProcessGroup
        One that was made after :func:`number` was called. A module from before is over it only
        since its `_update_process_group`, and known from that.
    """
    every = [ref() for ref in _all.valuerefs()]  # other threads may make modules meanwhile
    return [
        module
        for module in every
        if module is not None
        and vars(module).get("process_group") is group
        and hasattr(module, "reducer")
    ]


def number() -> None:
    """Number modules from now on; local, and once is enough."""
    make = DistributedDataParallel.__init__
    if getattr(make, "__module__", None) == __name__:
        return

    @functools.wraps(make)
    def __init__(self: Any, *arguments: Any, **named: Any) -> None:
        before, mine = being_made(), next(_numbers)
        _making.module, _all[id(self)] = self, self
        try:
            make(self, *arguments, **named)
        finally:
            _making.module = before
        numbered[mine] = self

    __init__.__module__ = __name__
    DistributedDataParallel.__init__ = __init__  # type: ignore[method-assign]
    for name in ("__setstate__", "_update_process_group"):
        setattr(DistributedDataParallel, name, _noting(getattr(DistributedDataParallel, name)))


def _noting(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of modules that makes them known."""

    @functools.wraps(method)
    def noting(self: Any, *arguments: Any, **named: Any) -> Any:
        _all[id(self)] = self
        return method(self, *arguments, **named)

    return noting
