"""A store in a file that all processes can reach."""

from __future__ import annotations

import itertools
import os
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache
from typing import TypeVar

from hpcdist import config
from hpcdist.errors import DistStoreError, QueueEmptyError, StoreTimeoutError

from . import _journal as journal
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
from ._shared_file import SharedFile
from ._table import Table
from .base import Store, Value

T = TypeVar("T")

_LONGEST_NAP = 0.01
#: Seconds that a caller which gives up a barrier waits for the file's lock to say so.
_LEAVING = 2.0
#: Nanoseconds by which the clocks of two hosts may differ.
_CLOCKS_APART = 60 * 10**9

_callers = itertools.count()


class _Handle:
    """Lives as long as a FileStore or one of its clones, which then leave the file."""


class FileStore(Store):
    """A store in a file: each change is a record, on the disk before the call returns.

    A record that a killed process left half written is ignored and cut off. A file that an earlier
    job left behind is found out, because none of its members lives any more, and started over. With
    a fixed `world_size` the last member to leave deletes the file.

    Parameters
    ----------
    file_name : str or path-like
        The file; its folder has to exist. It is made with mode 0600, and refused if it belongs to
        another user, is open to others, or is a symbolic link.
    world_size : int
        Number of processes that will open it; negative if that is not fixed.
    timeout : datetime.timedelta or float
        Seconds that operations wait, also for the file's lock.
    job_id : str, optional
        Distinguishes jobs that use the same file in turn; the same for all processes of a job.
        By default it is taken from ``HPCDIST_STORE_KEY``, torchrun's run id or Slurm's job
        number.

    Raises
    ------
    DistStoreError
        At once: if the folder is missing, the file is not a store, is not safe, or is in use by
        another job; or if the processes disagree about `world_size`.
    StoreTimeoutError
        If as many as `world_size` have joined and have not left, or the file stays locked.

    Notes
    -----
    Local to this process. Source: ``torch.distributed.FileStore``.
    """

    #: See :class:`hpcdist.store._shared_file.SharedFile`.
    _since = 0.0

    def __init__(
        self,
        file_name: str | os.PathLike[str],
        world_size: int = -1,
        timeout: Timeout = DEFAULT_TIMEOUT,
        job_id: str | None = None,
    ) -> None:
        path = _path(file_name)
        size = whole(world_size, "world_size")
        if size == 0:
            raise ValueError("FileStore world size cannot be 0")
        self._timeout = timedelta(seconds=seconds_of(timeout))
        deadline = Deadline(seconds_of(timeout))
        limit = int(config.get("store_limit"))
        job = journal.job_digest(job_id)
        self._file = SharedFile(path, max(size, -1), job, deadline, limit, self._since)
        self._handle = _Handle()
        weakref.finalize(self._handle, self._file.leave)

    @property
    def path(self) -> str:
        """The file's absolute path."""
        return self._file.path

    def close(self) -> None:
        """Leave the store now, instead of when this object and its clones are gone."""
        self._file.close()

    def set(self, key: str, value: Value) -> None:
        name, data = key_of(key), value_of(value)
        with self._file.exclusive(self._deadline(None)):
            self._file.write([(journal.SET, name, data)])

    def get(self, key: str) -> bytes:
        return self._values([key_of(key)], "get")[0]

    def add(self, key: str, value: int) -> int:
        name, amount = key_of(key), whole(value, "the amount to add")
        with self._file.exclusive(self._deadline(None)) as table:
            total = table.sum_of(name, amount)
            if amount or name not in table.values:
                self._file.write([(journal.SET, name, b"%d" % total)])
            return total

    def compare_set(self, key: str, expected_value: Value, desired_value: Value) -> bytes:
        name, expected, desired = key_of(key), value_of(expected_value), value_of(desired_value)
        with self._file.exclusive(self._deadline(None)) as table:
            store, answer = table.exchange(name, expected, desired)
            if store:
                self._file.write([(journal.SET, name, desired)])
            return answer

    def check(self, keys: Sequence[str]) -> bool:
        names = key_list(keys)
        return not self._look(lambda table: table.missing(names))

    def wait(self, keys: Sequence[str], timeout: Timeout | None = None) -> None:
        names = key_list(keys)
        self._until(lambda table: table.missing(names), "wait", self._deadline(timeout))

    def delete_key(self, key: str) -> bool:
        name = key_of(key)
        with self._file.exclusive(self._deadline(None)) as table:
            if name not in table.values:
                return False
            self._file.write([(journal.DELETE, name, b"")])
            return True

    def append(self, key: str, value: Value) -> None:
        name, tail = key_of(key), value_of(value)
        with self._file.exclusive(self._deadline(None)):
            self._file.write([(journal.TAIL, name, tail)])

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return self._values(key_list(keys), "multi_get")

    def multi_set(self, keys: Sequence[str], values: Sequence[Value]) -> None:
        entries = [(journal.SET, name, value) for name, value in self._pairs(keys, values)]
        if entries:
            with self._file.exclusive(self._deadline(None)):
                self._file.write(entries)

    def queue_push(self, key: str, value: Value) -> None:
        name, data = key_of(key), value_of(value)
        with self._file.exclusive(self._deadline(None)):
            self._file.write([(journal.PUSH, name, data)])

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        name = key_of(key)
        deadline = self._deadline(None)
        empty = [name]
        while True:
            if block:
                self._until(
                    lambda table: [] if table.length(name) else empty, "queue_pop", deadline
                )
            with self._file.exclusive(deadline) as table:
                if table.length(name):
                    value = table.queues[name][0]
                    self._file.write([(journal.POP, name, b"")])
                    return value
            if not block:
                raise QueueEmptyError(f"the queue {name} is empty ({self._where()})")

    def queue_len(self, key: str) -> int:
        name = key_of(key)
        return self._look(lambda table: table.length(name))

    def barrier(self, key: str, world_size: int, timeout: Timeout | None = None) -> None:
        name, size = key_of(key), self._barrier_size(world_size)
        deadline = self._deadline(timeout)
        caller = f"{_boot()}.{self._file.id}.{next(_callers)}"
        own = -1
        waiting = [name]
        try:
            with self._file.exclusive(deadline) as table:
                self._drop_late(table, name)
                table.size_of_barrier(name, size)
                own = table.round_of(name)
                until = time.time_ns() + int(deadline.left() * 1e9)
                self._file.write([journal.arrive(name, size, caller, until)])
            self._until(
                lambda table: [] if table.passed(name, own, caller) else waiting,
                "barrier",
                deadline,
            )
        except BaseException as error:
            if own < 0:
                raise
            passed, arrived = self._leave_barrier(name, own, caller)
            if not isinstance(error, StoreTimeoutError):
                raise
            if not passed:
                raise timed_out(
                    "barrier", deadline.seconds, [name], self._where(), arrived.format(size=size)
                ) from None

    def _drop_late(self, table: Table, name: str) -> None:
        """Count no caller whose time is over: it was killed, or could not leave the barrier."""
        now, here = time.time_ns(), _boot()
        late = [
            caller
            for caller, until in table.callers(name).items()
            if until + (0 if caller.startswith(here) else _CLOCKS_APART) < now
        ]
        if late:
            self._file.write([(journal.LEAVE, name, caller.encode()) for caller in late])

    def _leave_barrier(self, name: str, own: int, caller: str) -> tuple[bool, str]:
        """Leave the barrier; returns whether its round has ended, else how many had come."""
        self._file.owed.append((journal.LEAVE, name, caller.encode()))
        try:
            with self._file.exclusive(Deadline(_LEAVING)) as table:  # writes what is owed
                others = len(table.callers(name))
                return table.passed(name, own, caller), f"{others + 1}/{{size}} arrived"
        except (DistStoreError, OSError) as error:
            why = str(error).replace("{", "{{").replace("}", "}}")
            return False, f"leaving it failed: {why}"

    def num_keys(self) -> int:
        return self._look(lambda table: len(table.values))

    def list_keys(self) -> list[str]:
        return self._keys_below("")

    def clone(self) -> FileStore:
        twin = FileStore.__new__(FileStore)
        twin._file, twin._handle = self._file, self._handle
        twin._timeout = self._timeout
        return twin

    def _look(self, question: Callable[[Table], T]) -> T:
        """Evaluate a question on the up-to-date contents."""
        with self._file.reading(self._deadline(None)) as table:
            return question(table)

    def _until(self, missing: Callable[[Table], list[str]], what: str, deadline: Deadline) -> None:
        """Wait until nothing is missing."""
        nap = 0.0002
        while True:
            with self._file.reading(deadline) as table:
                names = missing(table)
            if not names:
                return
            if deadline.expired():
                raise timed_out(what, deadline.seconds, names, self._where())
            time.sleep(min(nap, deadline.left()))
            nap = min(2 * nap, _LONGEST_NAP)

    def _values(self, names: list[str], what: str) -> list[bytes]:
        """Wait for values and return them."""
        found: list[bytes] = []

        def look(table: Table) -> list[str]:
            missing = table.without_value(names)
            if not missing:
                found.extend(table.values[name] for name in names)
            return missing

        self._until(look, what, self._deadline(None))
        return found

    def _keys_below(self, prefix: str) -> list[str]:
        return self._look(lambda table: table.below(prefix))

    def _where(self) -> str:
        return f"FileStore {self._file.path}"


@cache
def _boot() -> str:
    """Return what processes have in common that read the same clock."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read(8)
    except OSError:
        return os.urandom(4).hex()


def _path(given: str | os.PathLike[str]) -> str:
    try:
        name = os.fspath(given)
    except TypeError:
        raise TypeError(f"file_name must be a path, not {given!r}") from None
    if not isinstance(name, str):
        raise TypeError(f"file_name must be a path of text, not {given!r}")
    if not name or "\0" in name:
        raise ValueError(f"file_name {given!r} cannot be the name of a file")
    return os.path.abspath(name)
