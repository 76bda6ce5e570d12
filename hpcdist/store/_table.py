"""The contents of a store in this process's memory: values, queues and barriers."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence

from hpcdist.errors import DistStoreError, QueueEmptyError

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


class Barrier:
    """A barrier: the round it is in, and the callers of that round."""

    def __init__(self) -> None:
        self.size = 0
        self.round = 0
        #: caller -> nanoseconds since 1970 until which it waits
        self.callers: dict[str, int] = {}


class Table:
    """Values, queues and barriers by name. Not thread-safe: the owner must lock it."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.queues: dict[str, deque[bytes]] = {}
        self.barriers: dict[str, Barrier] = {}
        #: Callers that were taken out of a barrier: they do not pass, whatever round ends.
        self.dropped: set[str] = set()

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
        if state is not None and state.callers and state.size != size:
            raise DistStoreError(
                f"barrier {key}: this caller says world_size={size}, those that are in it said "
                f"{state.size}"
            )

    def round_of(self, key: str) -> int:
        """Return the round whose end a caller that enters the barrier now waits for."""
        return self.barriers[key].round if key in self.barriers else 0

    def arrive(self, key: str, size: int, caller: str, until: int = 0) -> None:
        """Enter a barrier."""
        state = self.barriers.setdefault(key, Barrier())
        state.size = size
        state.callers[caller] = until
        if len(state.callers) == size:
            state.round += 1
            state.callers.clear()

    def passed(self, key: str, own: int, caller: str) -> bool:
        """Return whether the round of a caller has ended."""
        return self.round_of(key) > own and caller not in self.dropped

    def inside(self, key: str, caller: str) -> bool:
        """Return whether a caller is in the present round."""
        return key in self.barriers and caller in self.barriers[key].callers

    def callers(self, key: str) -> dict[str, int]:
        """Return the callers of the present round, and until when they wait."""
        return self.barriers[key].callers if key in self.barriers else {}

    def leave(self, key: str, caller: str) -> int:
        """Leave a barrier that did not fill; returns how many callers had entered it."""
        callers = self.barriers[key].callers
        callers.pop(caller, None)
        return len(callers) + 1

    def drop(self, key: str, caller: str) -> None:
        """Take a caller out of a barrier, if it is in it."""
        if self.inside(key, caller):
            self.leave(key, caller)
            self.dropped.add(caller)
