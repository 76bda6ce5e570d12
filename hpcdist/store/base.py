"""The interface of a key-value store, and the methods built from its basic operations."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from hpcdist.errors import QueueEmptyError

from ._basic import BasicStore, Value
from ._common import (
    Timeout,
    key_list,
    key_of,
    timed_out,
    value_of,
)

__all__ = ["Store", "Value"]


class Store(BasicStore):
    """A key-value store that the processes of a job share; base class for custom stores.

    A subclass must implement ``set``, ``get``, ``add`` (atomic), ``check`` and ``delete_key``. This
    class builds the other methods from those, in the simplest correct way; override what your store
    can do better. A lock key made with ``add`` then guards ``compare_set``, ``append`` and the
    queues: a process that is killed inside one leaves the lock, and the others time out with its
    name.

    Keys are text. Values are str or bytes on the way in and bytes on the way out. A timeout is a
    :class:`datetime.timedelta` or a number of seconds.

    Notes
    -----
    Local to this process. Source: ``torch.distributed.Store``.
    """

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        # What a method means is the same in every store; help() shows it.
        for name, method in vars(cls).items():
            general = getattr(Store, name, None)
            if general is not None and callable(method) and not method.__doc__:
                method.__doc__ = general.__doc__

    def clone(self) -> Store:
        """Return another object for the same store, with its own timeout.

        Returns
        -------
        Store
            It sees the same keys. Several threads may share one of hpcdist's stores also without a
            clone.

        Raises
        ------
        NotImplementedError
            If the store does not support it.
        """
        raise self._missing("clone")

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
