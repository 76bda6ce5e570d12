"""Calls of the reducer's group that layers make in backward, such as those of SyncBatchNorm.

Where an exception ends backward on one rank, the others come to the next of these calls, and fail
there. So that rank makes one call more, in place of it; else the ranks would be out of step.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hpcdist.errors import DistMismatchError
from hpcdist.parallel.reducer.failure import current_backward
from hpcdist.parallel.reducer.graph import will_execute

_layers: weakref.WeakSet[Any] = weakref.WeakSet()


def announce(node: Any) -> None:
    """Note in forward that a layer makes a call in backward.

    Parameters
    ----------
    node : object
        The layer's node in autograd's graph: the `ctx` of its forward, with the ranks' `group`.
    """
    node.task = node.failed = None  # the backward of its last call; the text of that one's error
    _layers.add(node)


@contextmanager
def calling(node: Any) -> Iterator[None]:
    """Make the call within."""
    node.task, node.failed = current_backward(), None
    try:
        yield
    except BaseException as error:
        node.failed = str(error) if isinstance(error, DistMismatchError) else ""
        raise


class Beside:
    """The layers that make calls in the current backward pass."""

    def __init__(self) -> None:
        self._nodes: list[Any] = []

    def begin(self, comm: Any) -> None:
        """Find them, and keep their nodes: those whose calls of `comm` are still to come."""
        task = current_backward()
        self._nodes = [
            node
            for node in list(_layers)
            if node.group.carrier is comm and node.task != task and will_execute(node)
        ]

    def failed(self, task: int | None) -> DistMismatchError | None:
        """Return the error of a call that failed in the backward of this number, or None."""
        for node in self._nodes:
            if node.task == task and node.failed is not None:
                return DistMismatchError(node.failed)
        return None

    def missing(self, task: int | None) -> int:
        """Return how many calls a rank makes in place of the next one: 1, or 0 if there is none.

        Also 0 if that is the one that failed, or if another reducer has asked before.
        """
        left = [node for node in self._nodes if node.task != task]
        if not left or self.failed(task) is not None:
            return 0
        for node in left:
            node.task, node.failed = task, None
        return 1

    def reset(self) -> None:
        """The pass is over."""
        self._nodes = []
