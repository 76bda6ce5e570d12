"""A store in one process's memory, for its threads."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from hpcdist.errors import DistStoreError, StoreTimeoutError

from ._common import Deadline, Timeout, key_list, key_of, timed_out, value_of, whole
from ._table import Table
from .base import Store, Value

_callers = itertools.count()


class _Shared:
    """What a HashStore and its clones share."""

    def __init__(self) -> None:
        self.table = Table()
        self.changed = threading.Condition()
        self.pid = os.getpid()


class HashStore(Store):
    """A store for the threads of one process. Nothing leaves the process.

    Notes
    -----
    Local to this process. After a fork the child's operations raise: it would see a copy that
    nobody else sees. Source: ``torch.distributed.HashStore``.
    """

    def __init__(self) -> None:
        self._shared = _Shared()

    @contextmanager
    def _open(self, wake: bool = False) -> Iterator[Table]:
        """Lock the table and return it; with `wakes`, wake the waiting threads afterwards."""
        shared = self._shared
        if shared.pid != os.getpid():
            raise DistStoreError(
                f"this HashStore belongs to process {shared.pid}, and this is a child of it: the "
                "two would see different keys. Use a FileStore or a TCPStore between processes"
            )
        with shared.changed:
            yield shared.table
            if wake:
                shared.changed.notify_all()

    def set(self, key: str, value: Value) -> None:
        name, data = key_of(key), value_of(value)
        with self._open(wake=True) as table:
            table.values[name] = data

    def get(self, key: str) -> bytes:
        name = key_of(key)
        deadline = self._deadline(None)
        with self._open() as table:
            self._until(lambda: table.without_value([name]), "get", deadline)
            return table.values[name]

    def add(self, key: str, value: int) -> int:
        name, amount = key_of(key), whole(value, "the amount to add")
        with self._open(wake=True) as table:
            total = table.sum_of(name, amount)
            table.values[name] = b"%d" % total
            return total

    def compare_set(self, key: str, expected_value: Value, desired_value: Value) -> bytes:
        name, expected, desired = key_of(key), value_of(expected_value), value_of(desired_value)
        with self._open(wake=True) as table:
            store, answer = table.exchange(name, expected, desired)
            if store:
                table.values[name] = desired
            return answer

    def check(self, keys: Sequence[str]) -> bool:
        names = key_list(keys)
        with self._open() as table:
            return not table.missing(names)

    def wait(self, keys: Sequence[str], timeout: Timeout | None = None) -> None:
        names = key_list(keys)
        deadline = self._deadline(timeout)
        with self._open() as table:
            self._until(lambda: table.missing(names), "wait", deadline)

    def delete_key(self, key: str) -> bool:
        name = key_of(key)
        with self._open() as table:
            return table.values.pop(name, None) is not None

    def append(self, key: str, value: Value) -> None:
        name, tail = key_of(key), value_of(value)
        with self._open(wake=True) as table:
            table.values[name] = table.values.get(name, b"") + tail

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        names = key_list(keys)
        deadline = self._deadline(None)
        with self._open() as table:
            self._until(lambda: table.without_value(names), "multi_get", deadline)
            return [table.values[name] for name in names]

    def multi_set(self, keys: Sequence[str], values: Sequence[Value]) -> None:
        pairs = self._pairs(keys, values)
        with self._open(wake=True) as table:
            table.values.update(pairs)

    def queue_push(self, key: str, value: Value) -> None:
        name, data = key_of(key), value_of(value)
        with self._open(wake=True) as table:
            table.push(name, data)

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        name = key_of(key)
        deadline = self._deadline(None)
        with self._open() as table:
            if block:
                empty = [name]
                self._until(lambda: [] if table.length(name) else empty, "queue_pop", deadline)
            return table.pop(name)

    def queue_len(self, key: str) -> int:
        name = key_of(key)
        with self._open() as table:
            return table.length(name)

    def barrier(self, key: str, world_size: int, timeout: Timeout | None = None) -> None:
        name, size = key_of(key), self._barrier_size(world_size)
        deadline = self._deadline(timeout)
        with self._open(wake=True) as table:
            table.size_of_barrier(name, size)
            own, caller = table.round_of(name), str(next(_callers))
            table.arrive(name, size, caller)
            if table.passed(name, own, caller):
                return
            waiting = [name]
            try:
                self._until(
                    lambda: [] if table.passed(name, own, caller) else waiting, "barrier", deadline
                )
            except StoreTimeoutError:
                arrived = table.leave(name, caller)
                raise timed_out(
                    "barrier", deadline.seconds, [name], self._where(), f"{arrived}/{size} arrived"
                ) from None
            except BaseException:
                # Ctrl-C
                table.leave(name, caller)
                raise

    def num_keys(self) -> int:
        with self._open() as table:
            return len(table.values)

    def list_keys(self) -> list[str]:
        return self._keys_below("")

    def clone(self) -> HashStore:
        twin = HashStore()
        twin._shared = self._shared
        twin._timeout = self._timeout
        return twin

    def _until(self, missing: Callable[[], list[str]], what: str, deadline: Deadline) -> None:
        """Wait until nothing is missing; the caller has the lock."""
        while names := missing():
            if deadline.expired():
                raise timed_out(what, deadline.seconds, names, self._where())
            self._shared.changed.wait(deadline.left())

    def _keys_below(self, prefix: str) -> list[str]:
        with self._open() as table:
            return table.below(prefix)

    def _where(self) -> str:
        return f"HashStore of process {self._shared.pid}"
