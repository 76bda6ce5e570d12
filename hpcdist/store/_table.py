"""The contents of a store in this process's memory: values, queues and barriers."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence

from hpcdist.errors import DistStoreError, QueueEmptyError

__all__ = ["Table", "number"]

_WHOLE = re.compile(rb"[ \t\n\v\f\r]*[+-]?[0-9]{1,19}\Z")


def number(key: str, value: bytes, amount: int) -> int:
    """Return the value of a counter after an addition.

    Parameters
    ----------
    key : str
        Its name, for the error.
    value : bytes
        The present value; an empty one is not a number.
    amount : int
        The number to add.

    Returns
    -------
    int
        The sum.

    Raises
    ------
    DistStoreError
        If the value or the sum is not a whole number of 64 bits.
    """
    present = int(value) if _WHOLE.match(value) else None
    if present is None or not -(1 << 63) <= present < 1 << 63:
        shown = value[:40] + (b"..." if len(value) > 40 else b"")
        raise DistStoreError(f"add: the key {key} holds {shown!r}, which is not a whole number")
    total = present + amount
    if not -(1 << 63) <= total < 1 << 63:
        raise DistStoreError(f"add: {present} + {amount} of the key {key} leaves 64 bits")
    return total


class Table:
    """Values, queues and barriers by name. Not thread-safe: the owner must lock it."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.queues: dict[str, deque[bytes]] = {}
        #: name -> [world size, round, callers in this round]
        self.barriers: dict[str, list[int]] = {}

    def sum_of(self, key: str, amount: int) -> int:
        """Return what ``add`` would store under a key."""
        return number(key, self.values[key], amount) if key in self.values else amount

    def exchange(self, key: str, expected: bytes, desired: bytes) -> tuple[bool, bytes]:
        """Return whether ``compare_set`` stores, and its result."""
        present = self.values.get(key)
        if present is None:
            return (False, expected) if expected else (True, desired)
        return (True, desired) if present == expected else (False, present)

    def has(self, key: str) -> bool:
        """Return whether a value or a queue of this name exists."""
        return key in self.values or key in self.queues

    def missing(self, keys: Sequence[str]) -> list[str]:
        """Return the keys that do not exist."""
        return [key for key in keys if not self.has(key)]

    def without_value(self, keys: Sequence[str]) -> list[str]:
        """Return the keys without a value."""
        return [key for key in keys if key not in self.values]

    def push(self, key: str, value: bytes) -> None:
        """Append a value to a queue."""
        self.queues.setdefault(key, deque()).append(value)

    def pop(self, key: str) -> bytes:
        """Remove a queue's first value; a queue that is then empty is deleted."""
        queue = self.queues.get(key)
        if queue is None:
            raise QueueEmptyError(f"the queue {key} is empty")
        value = queue.popleft()
        if not queue:
            del self.queues[key]
        return value

    def length(self, key: str) -> int:
        """Return the number of values in a queue."""
        return len(self.queues.get(key, ()))

    def below(self, prefix: str) -> list[str]:
        """Return the sorted keys that begin with a prefix."""
        return sorted(key for key in self.values if key.startswith(prefix))

    def size_of_barrier(self, key: str, size: int) -> None:
        """Refuse a caller that expects another number of callers than those in the barrier."""
        state = self.barriers.get(key)
        if state is not None and state[2] and state[0] != size:
            raise DistStoreError(
                f"barrier {key}: this caller says world_size={size}, those that are in it said "
                f"{state[0]}"
            )

    def arrive(self, key: str, size: int) -> int:
        """Enter a barrier; returns the round whose end the caller waits for."""
        state = self.barriers.setdefault(key, [size, 0, 0])
        state[0] = size
        state[2] += 1
        own = state[1]
        if state[2] == size:
            state[1] += 1
            state[2] = 0
        return own

    def passed(self, key: str, own: int) -> bool:
        """Return whether a round of a barrier has ended."""
        return self.barriers[key][1] > own

    def leave(self, key: str) -> int:
        """Leave a barrier that did not fill; returns how many callers had entered it."""
        state = self.barriers[key]
        state[2] -= 1
        return state[2] + 1
