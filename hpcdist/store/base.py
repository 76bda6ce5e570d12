"""The interface of a key-value store, and the methods built from its basic operations."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import NoReturn

from hpcdist.errors import QueueEmptyError

from ._common import (
    DEFAULT_TIMEOUT,
    Deadline,
    Timeout,
    key_list,
    key_of,
    seconds_of,
    timed_out,
    value_of,
    whole,
)

Value = str | bytes


class Store:
    """A key-value store that the processes of a job share; base class for custom stores.

    A subclass must implement ``set``, ``get``, ``add`` (atomic), ``check`` and ``delete_key``. This
    class builds the other methods from those, in the simplest correct way; override what your store
    can do better. A method that a store does not offer raises NotImplementedError.

    A lock key made with ``add`` guards ``compare_set``, ``append`` and the queues as built here: a
    process that is killed inside one leaves the lock, and the others time out with its name.

    Keys are text. Values are str or bytes on the way in and bytes on the way out. A timeout is a
    :class:`datetime.timedelta` or a number of seconds.

    Notes
    -----
    Local to this process. Source: ``torch.distributed.Store``.
    """

    _timeout: timedelta = DEFAULT_TIMEOUT
    #: Whether a wait that is too short does nothing but raise: torch's TCPStore logs each.
    _waits_quietly = True

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        # What a method means is the same in every store; help() shows it.
        for name, method in vars(cls).items():
            general = getattr(Store, name, None)
            if general is not None and callable(method) and not method.__doc__:
                method.__doc__ = general.__doc__

    # --- what a store provides itself ---

    def set(self, key: str, value: Value) -> None:
        """Store a value, and replace any that is there. On return the value is stored.

        Parameters
        ----------
        key : str
            Its name.
        value : str or bytes
            Any length, including 0.
        """
        self._missing("set")

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
        """
        self._missing("get")

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
        """
        self._missing("add")

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
        """
        self._missing("check")

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
        """
        self._missing("delete_key")

    def num_keys(self) -> int:
        """Count the keys that were set.

        Returns
        -------
        int
            Without queues, and without keys of the store's own.
        """
        return len(self.list_keys())

    def list_keys(self) -> list[str]:
        """List the keys that were set.

        Returns
        -------
        list of str
            Sorted; without queues, and without keys of the store's own.
        """
        self._missing("list_keys")

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

    # --- what is built from it ---

    def clone(self) -> Store:
        """Return another object for the same store, with its own timeout.

        Returns
        -------
        Store
            It sees the same keys. Several threads may share one of hpcdist's stores also without a
            clone.
        """
        self._missing("clone")

    def wait(self, keys: Sequence[str], timeout: Timeout | None = None) -> None:
        """Wait until all keys exist.

        Parameters
        ----------
        keys : list of str
            Their names; values, or queues that are not empty.
        timeout : datetime.timedelta or float, optional
            Seconds; by default the store's timeout. 0 checks once.

        Raises
        ------
        StoreTimeoutError
            If some are missing after that time. It names them.
        """
        names = key_list(keys)
        deadline = self._deadline(timeout)
        nap = 0.0005
        while not self.check(names):
            if deadline.expired():
                missing = [name for name in names if not self.check([name])]
                if missing:
                    raise timed_out("wait", deadline.seconds, missing, self._where())
                return
            time.sleep(min(nap, deadline.left()))
            nap = min(2 * nap, 0.02)

    def compare_set(self, key: str, expected_value: Value, desired_value: Value) -> bytes:
        """Store a value if the current one is what the caller expects.

        Parameters
        ----------
        key : str
            Its name.
        expected_value : str or bytes
            The value that the key must have; empty means that the key must be missing or empty.
        desired_value : str or bytes
            What to store.

        Returns
        -------
        bytes
            The key's value afterwards. If the key is missing and a value was expected, it stays
            missing, and the result is `expected_value`.

        Raises
        ------
        StoreTimeoutError
            If the store did not answer within its timeout.
        """
        expected, desired = value_of(expected_value), value_of(desired_value)
        with self._locked(key):
            if not self.check([key]):
                if expected:
                    return expected
            else:
                present = self.get(key)
                if present != expected:
                    return present
            self.set(key, desired)
            return desired

    def append(self, key: str, value: Value) -> None:
        """Append bytes to a value; a missing key counts as empty.

        Parameters
        ----------
        key : str
            Its name.
        value : str or bytes
            What to append.

        Raises
        ------
        StoreTimeoutError
            If the store did not answer within its timeout.
        """
        tail = value_of(value)
        with self._locked(key):
            head = self.get(key) if self.check([key]) else b""
            self.set(key, head + tail)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Wait for several keys and return their values.

        Parameters
        ----------
        keys : list of str
            Their names.

        Returns
        -------
        list of bytes
            In the same order.

        Raises
        ------
        StoreTimeoutError
            If some are missing after the store's timeout. It names them.
        """
        names = key_list(keys)
        self.wait(names)
        return [self.get(name) for name in names]

    def multi_set(self, keys: Sequence[str], values: Sequence[Value]) -> None:
        """Store several values. hpcdist's own stores do it in one step.

        Parameters
        ----------
        keys : list of str
            Their names.
        values : list of str or bytes
            As many.

        Raises
        ------
        ValueError
            If the lists differ in length.
        """
        for name, value in self._pairs(keys, values):
            self.set(name, value)

    def queue_push(self, key: str, value: Value) -> None:
        """Append a value to a queue. A queue and a value of the same name are distinct.

        Parameters
        ----------
        key : str
            The queue's name.
        value : str or bytes
            What to append.

        Raises
        ------
        StoreTimeoutError
            If the store did not answer within its timeout.
        """
        item = value_of(value)
        with self._locked(f"{key}/queue"):
            self.set(f"{key}/queue/{self.add(f'{key}/queue/tail', 1)}", item)

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        """Take the value at the head of a queue. Each value goes to one caller.

        Parameters
        ----------
        key : str
            The queue's name.
        block : bool
            Whether to wait, up to the store's timeout, while the queue is empty.

        Returns
        -------
        bytes
            The value.

        Raises
        ------
        QueueEmptyError
            If it is empty and `block` is False.
        StoreTimeoutError
            If it is still empty after the store's timeout.
        """
        deadline = self._deadline(None)
        nap = 0.0005
        while True:
            with self._locked(f"{key}/queue"):
                head = self.add(f"{key}/queue/head", 0)
                if head < self.add(f"{key}/queue/tail", 0):
                    value = self.get(f"{key}/queue/{head + 1}")
                    self.add(f"{key}/queue/head", 1)
                    self.delete_key(f"{key}/queue/{head + 1}")
                    return value
            if not block:
                raise QueueEmptyError(f"the queue {key} is empty ({self._where()})")
            if deadline.expired():
                raise timed_out("queue_pop", deadline.seconds, [key], self._where())
            time.sleep(min(nap, deadline.left()))
            nap = min(2 * nap, 0.02)

    def queue_len(self, key: str) -> int:
        """Count the values in a queue.

        Parameters
        ----------
        key : str
            The queue's name.

        Returns
        -------
        int
            0 also if nothing was ever pushed.
        """
        # in this order: after a concurrent pop the result is too large, never negative
        head = self.add(f"{key}/queue/head", 0)
        return self.add(f"{key}/queue/tail", 0) - head

    def barrier(self, key: str, world_size: int, timeout: Timeout | None = None) -> None:
        """Wait until `world_size` callers are in the barrier of this name.

        The barrier can be reused for the next round. In hpcdist's own stores a caller that times
        out leaves the barrier, so either all callers of a round pass or none; here, built from
        ``add``, it stays counted, as in torch.

        Parameters
        ----------
        key : str
            The barrier's name.
        world_size : int
            Number of callers, at least 1; the same for all.
        timeout : datetime.timedelta or float, optional
            Seconds; by default the store's timeout.

        Raises
        ------
        StoreTimeoutError
            If too few callers arrived within that time. The error has their number.
        ValueError
            If `world_size` is below 1.
        """
        size = self._barrier_size(world_size)
        deadline = self._deadline(timeout)
        arrived = self.add(f"{key}/num_members", 1)
        done = f"{key}/last_member/{(arrived - 1) // size}"
        if arrived % size == 0:
            self.set(done, b"1")
        else:
            self.wait([done], deadline.left())

    def has_extended_api(self) -> bool:
        """Return whether append, multi_get, multi_set and queues are supported.

        Returns
        -------
        bool
            Always True in hpcdist: this class has them for every store.
        """
        return True

    @contextmanager
    def _locked(self, key: str) -> Iterator[None]:
        """Context manager that locks, so that several basic operations are atomic."""
        lock = f"{key_of(key)}/lock"
        deadline = self._deadline(None)
        nap = 0.0005
        while self.add(lock, 1) != 1:
            self.add(lock, -1)
            if deadline.expired():
                raise timed_out(
                    "lock", deadline.seconds, [lock], self._where(),
                    "a process holds it or was killed while it did",
                )  # fmt: skip
            time.sleep(min(nap, deadline.left()))
            nap = min(2 * nap, 0.02)
        try:
            yield
        finally:
            self.add(lock, -1)

    # --- for the classes of this package ---

    def _where(self) -> str:
        """Return what messages call the store."""
        return type(self).__name__

    def _missing(self, name: str) -> NoReturn:
        raise NotImplementedError(f"{type(self).__name__} has no {name}()")

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
