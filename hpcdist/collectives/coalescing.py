"""torch's context for several operations, which begins them one by one."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from hpcdist.groups.hooks import PostHookArgs
from hpcdist.groups.resolve import resolve
from hpcdist.groups.state import ProcessGroup

#: Numbers of hooks, far from those of users.
_numbers = itertools.count(1 << 62)


class _CoalescingManager:
    """The handles of the operations of one context."""

    def __init__(self) -> None:
        self.works: list[Any] = []

    def append(self, work: Any = None) -> None:
        """Add a handle to those that :meth:`wait` waits for; None adds nothing."""
        if work is not None:
            self.works.append(work)

    def wait(self) -> None:
        """Wait for all operations."""
        for work in self.works:
            work.wait()


@contextmanager
def _coalescing_manager(
    group: ProcessGroup | None = None, device: Any = None, async_ops: bool | None = False
) -> Iterator[_CoalescingManager]:
    """Wait together for the operations that this thread begins under the context.

    Local. Each operation is an operation of its own, as without the context:
    :func:`hpcdist.all_reduce_coalesced` and :func:`hpcdist.batch_isend_irecv` move several tensors
    in one.

    Parameters
    ----------
    group : ProcessGroup, optional
        The group of the operations. None means the default group.
    device : object, optional
        Ignored.
    async_ops : bool, optional
        True: the caller waits with the object that the context gives. False: the end of the context
        waits.

    Notes
    -----
    Source: ``torch.distributed._coalescing_manager``, which over NCCL merges the operations.
    """
    manager = _CoalescingManager()
    pg = resolve(group)
    if not isinstance(pg, ProcessGroup):
        yield manager
        return
    own, number = threading.get_ident(), next(_numbers)

    def collect(operation: PostHookArgs) -> None:
        if threading.get_ident() == own:
            manager.append(operation.work)

    pg.register_post_hook(number, collect)
    try:
        yield manager
    finally:
        with suppress(ValueError):  # of a group that was destroyed under the context
            pg.unregister_post_hook(number)
    if not async_ops:
        manager.wait()
