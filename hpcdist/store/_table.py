"""The contents of a store in this process's memory: values, queues and barriers."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence

from hpcdist.errors import DistStoreError, QueueEmptyError

__all__ = ["Table", "number"]

_WHOLE = re.compile(rb"[ \t\n\v\f\r]*[+-]?[0-9]{1,19}\Z")


def number(key: str, value: bytes, amount: int) -> int:
    """What a counter holds after an addition.

    Parameters
    ----------
    key : str
        Its name, for the error.
    value : bytes
        What is there; empty counts as no number.
    amount : int
        What to add.

    Returns
    -------
    int
        The sum.

    Raises
    ------
    DistStoreError
        If the value is no whole number of 64 bits, or the sum is not.
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
    """Values, queues and barriers by name. Not safe for threads: its owner has the lock."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.queues: dict[str, deque[bytes]] = {}
        #: name -> [world size, round, callers in this round]
        self.barriers: dict[str, list[int]] = {}

    def sum_of(self, key: str, amount: int) -> int:
        """What ``add`` would make of a key."""
        return number(key, self.values[key], amount) if key in self.values else amount

    def exchange(self, key: str, expected: bytes, desired: bytes) -> tuple[bool, bytes]:
        """Whether ``compare_set`` stores, and what it answers."""
        present = self.values.get(key)
        if present is None:
            return (False, expected) if expected else (True, desired)
        return (True, desired) if present == expected else (False, present)

    def has(self, key: str) -> bool:
        """Whether a value or a queue of this name is there."""
        return key in self.values or key in self.queues

    def missing(self, keys: Sequence[str]) -> list[str]:
        """Those that are not there."""
        return [key for key in keys if not self.has(key)]

    def without_value(self, keys: Sequence[str]) -> list[str]:
        """Those that no value was set for."""
        return [key for key in keys if key not in self.values]

    def push(self, key: str, value: bytes) -> None:
        """Put a value at the end of a queue."""
        self.queues.setdefault(key, deque()).append(value)

    def pop(self, key: str) -> bytes:
        """Take a queue's first value; an empty queue is no queue."""
        queue = self.queues.get(key)
        if queue is None:
            raise QueueEmptyError(f"the queue {key} is empty")
        value = queue.popleft()
        if not queue:
            del self.queues[key]
        return value

    def length(self, key: str) -> int:
        """Values in a queue."""
        return len(self.queues.get(key, ()))

    def below(self, prefix: str) -> list[str]:
        """Sorted keys that begin with a prefix."""
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
        """Enter a barrier; the answer is the round that the caller waits for the end of."""
        state = self.barriers.setdefault(key, [size, 0, 0])
        state[0] = size
        state[2] += 1
        own = state[1]
        if state[2] == size:
            state[1] += 1
            state[2] = 0
        return own

    def passed(self, key: str, own: int) -> bool:
        """Whether a round of a barrier is over."""
        return self.barriers[key][1] > own

    def leave(self, key: str) -> int:
        """Go out of a barrier that did not fill; the answer is how many had come."""
        state = self.barriers[key]
        state[2] -= 1
        return state[2] + 1
