"""What every key-value store has: the few operations that it provides itself, and a timeout."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from ._common import (
    DEFAULT_TIMEOUT,
    Deadline,
    Timeout,
    key_list,
    seconds_of,
    value_of,
    whole,
)

__all__ = ["BasicStore", "Value"]

Value = str | bytes


class BasicStore:
    """Base of :class:`hpcdist.Store`, which builds everything else from these operations."""

    _timeout: timedelta = DEFAULT_TIMEOUT

    def set(self, key: str, value: Value) -> None:
        """Store a value, and replace any that is there. On return the value is stored.

        Parameters
        ----------
        key : str
            Its name.
        value : str or bytes
            Any length, including 0.

        Raises
        ------
        NotImplementedError
            If the store does not offer it.
        """
        raise self._missing("set")

    def get(self, key: str) -> bytes:
        """Wait for a key and return its value.

        Parameters
        ----------
        key : str
            Its name.

        Returns
        -------
        bytes
            The value.

        Raises
        ------
        StoreTimeoutError
            If no process has set it within the store's timeout.
        NotImplementedError
            If the store does not offer it.
        """
        raise self._missing("get")

    def add(self, key: str, value: int) -> int:
        """Add to a counter, in one step that no other process can interrupt.

        Parameters
        ----------
        key : str
            Its name. A missing key counts as 0.
        value : int
            What to add, within 64 bits; may be negative.

        Returns
        -------
        int
            The sum. It is stored as decimal text.

        Raises
        ------
        DistStoreError
            If the value is not a whole number, or the sum does not fit into 64 bits.
        NotImplementedError
            If the store does not offer it.
        """
        raise self._missing("add")

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys exist, as values or as queues that are not empty.

        Parameters
        ----------
        keys : list of str
            Their names.

        Returns
        -------
        bool
            True for an empty list.

        Raises
        ------
        NotImplementedError
            If the store does not offer it.
        """
        raise self._missing("check")

    def delete_key(self, key: str) -> bool:
        """Delete a key and its value. Queues stay.

        Parameters
        ----------
        key : str
            Its name.

        Returns
        -------
        bool
            Whether it existed.

        Raises
        ------
        NotImplementedError
            If the store does not offer it.
        """
        raise self._missing("delete_key")

    def num_keys(self) -> int:
        """Count the keys that were set.

        Returns
        -------
        int
            Without queues, and without keys of the store's own.

        Raises
        ------
        NotImplementedError
            If the store does not offer it.
        """
        return len(self.list_keys())

    def list_keys(self) -> list[str]:
        """List the keys that were set.

        Returns
        -------
        list of str
            Sorted; without queues, and without keys of the store's own.

        Raises
        ------
        NotImplementedError
            If the store does not offer it.
        """
        raise self._missing("list_keys")

    def set_timeout(self, timeout: Timeout) -> None:
        """Set the time limit of this object's operations.

        Parameters
        ----------
        timeout : datetime.timedelta or float
            Seconds.

        Raises
        ------
        ValueError
            If it is negative.
        """
        self._timeout = timedelta(seconds=seconds_of(timeout))

    @property
    def timeout(self) -> timedelta:
        """The time limit of this object's operations."""
        return self._timeout

    # --- for the classes of this package ---------------------------------------------------------

    def _where(self) -> str:
        """Return what messages call the store."""
        return type(self).__name__

    def _missing(self, name: str) -> NotImplementedError:
        return NotImplementedError(f"{type(self).__name__} has no {name}()")

    def _deadline(self, timeout: Timeout | None) -> Deadline:
        return Deadline(seconds_of(self.timeout if timeout is None else timeout))

    @staticmethod
    def _pairs(keys: Sequence[str], values: Sequence[Value]) -> list[tuple[str, bytes]]:
        names = key_list(keys)
        if isinstance(values, (str, bytes)):
            raise TypeError(f"values must be a list, not one {type(values).__name__}")
        items = [value_of(value) for value in values]
        if len(names) != len(items):
            raise ValueError(f"multi_set got {len(names)} keys and {len(items)} values")
        return list(zip(names, items, strict=True))

    @staticmethod
    def _barrier_size(world_size: int) -> int:
        size = whole(world_size, "world_size")
        if size < 1:
            raise ValueError(f"a barrier needs a world_size of at least 1, not {size}")
        return size

    def _keys_below(self, prefix: str) -> list[str]:
        """Return the sorted keys that begin with a prefix."""
        return [key for key in self.list_keys() if key.startswith(prefix)]

    def _count_below(self, prefix: str) -> int:
        """Return the number of keys that begin with a prefix."""
        return len(self._keys_below(prefix))

    def __repr__(self) -> str:
        return f"<{self._where()}>"
