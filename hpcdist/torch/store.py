"""Adapters: hpcdist's stores for torch, and torch's stores for hpcdist."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as c10d

from hpcdist.errors import DistStoreError, QueueEmptyError, StoreTimeoutError
from hpcdist.store import Store

T = TypeVar("T")

#: A process group holds the C++ part of a store only. When the Python part goes, its methods do.
_alive: list[_ToTorch] = []


def to_torch(store: Store) -> c10d.Store:
    """Let torch use one of hpcdist's stores.

    Parameters
    ----------
    store : Store
        Any of hpcdist's, or of your own.

    Returns
    -------
    torch.distributed.Store
        To be given to ``torch.distributed.init_process_group(store=...)``,
        ``torch.distributed.PrefixStore`` and the like. It takes the GIL for each operation, and
        lives, with `store`, until the process ends: torch's C++ does not keep the Python part of a
        store alive. One that came from :func:`from_torch` is unwrapped.

    Raises
    ------
    TypeError
        If it is not a store of hpcdist.

    Notes
    -----
    Local to this process.
    """
    if isinstance(store, _FromTorch):
        return store.inner
    if not isinstance(store, Store):
        raise TypeError(f"to_torch takes an hpcdist store, not {type(store).__name__}")
    return _ToTorch(store)


def let_go(view: c10d.Store) -> None:
    """Let one of :func:`to_torch`'s go, with its store, once nothing in Python refers to it.

    Local. What in C++ still has it cannot use it any more.
    """
    _alive[:] = [each for each in _alive if each is not view]


def from_torch(store: c10d.Store) -> Store:
    """Let hpcdist use one of torch's stores.

    Parameters
    ----------
    store : torch.distributed.Store
        For example the one that torchrun made.

    Returns
    -------
    Store
        Its errors are hpcdist's; what torch's store does is otherwise unchanged. One that came from
        :func:`to_torch` is unwrapped.

    Raises
    ------
    TypeError
        If it is not a store of torch.

    Notes
    -----
    Local to this process.
    """
    if isinstance(store, _ToTorch):
        return store.inner
    if not isinstance(store, c10d.Store):
        raise TypeError(f"from_torch takes a torch store, not {type(store).__name__}")
    return _FromTorch(store)


class _ToTorch(c10d.Store):
    """torch's C++ calls these methods by name: some by those of Python, some by those of C++."""

    def __init__(self, inner: Store) -> None:
        super().__init__()
        self._inner = inner
        self._tell()
        _alive.append(self)

    def _tell(self) -> None:
        """Tell the C++ part the timeout."""
        super().set_timeout(self._inner.timeout)
        # in whole milliseconds; not in the stub
        self._told: timedelta = super().timeout  # type: ignore[misc]

    @property
    def inner(self) -> Store:
        """hpcdist's store. Its timeout is what C++, a PrefixStore for example, has set last."""
        if (limit := super().timeout) != self._told:  # type: ignore[misc]
            self._inner.set_timeout(limit)
            self._told = limit
        return self._inner

    def clone(self) -> _ToTorch:
        return _ToTorch(self.inner.clone())

    def set(self, key: str, value: str | bytes) -> None:
        self.inner.set(key, value)

    def get(self, key: str) -> bytes:
        return self.inner.get(key)

    def add(self, key: str, value: int) -> int:
        return self.inner.add(key, value)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        return self.inner.compare_set(key, expected, desired)

    def check(self, keys: Sequence[str]) -> bool:
        return self.inner.check(keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self.inner.wait(keys, timeout)

    def delete_key(self, key: str) -> bool:
        return self.inner.delete_key(key)

    def num_keys(self) -> int:
        return self.inner.num_keys()

    def list_keys(self) -> list[str]:
        return self.inner.list_keys()

    def append(self, key: str, value: str | bytes) -> None:
        self.inner.append(key, value)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return self.inner.multi_get(keys)

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        self.inner.multi_set(keys, values)

    def queue_push(self, key: str, value: str | bytes) -> None:
        self.inner.queue_push(key, value)

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        return self.inner.queue_pop(key, block)

    def queue_len(self, key: str) -> int:
        return self.inner.queue_len(key)

    def barrier(self, key: str, world_size: int, timeout: timedelta | None = None) -> None:
        self.inner.barrier(key, world_size, timeout)

    def has_extended_api(self) -> bool:
        return self.inner.has_extended_api()

    deleteKey = delete_key
    getNumKeys = num_keys
    multiGet = multi_get
    multiSet = multi_set
    queuePush = queue_push
    queuePop = queue_pop
    queueLen = queue_len
    listKeys = list_keys
    hasExtendedApi = has_extended_api

    def set_timeout(self, timeout: timedelta) -> None:
        self._inner.set_timeout(timeout)
        self._tell()

    @property
    def timeout(self) -> timedelta:
        return self.inner.timeout


class _FromTorch(Store):
    """A store of torch's with hpcdist's errors."""

    _waits_quietly = False

    def __init__(self, inner: c10d.Store) -> None:
        # torch's stub leaves half of the methods out
        self.inner: Any = inner

    def _call(self, call: Callable[..., T], *arguments: Any) -> T:
        try:
            return call(*arguments)
        except c10d.QueueEmptyError as error:
            raise QueueEmptyError(str(error)) from error
        except (RuntimeError, ValueError) as error:
            # torch says it in several classes: DistStoreError, RuntimeError, and ValueError of add
            late = "timeout" in str(error).lower()
            kind = StoreTimeoutError if late else DistStoreError
            raise kind(f"{error} ({self._where()})") from error

    def clone(self) -> Store:
        return _FromTorch(self._call(self.inner.clone))

    def set(self, key: str, value: str | bytes) -> None:
        self._call(self.inner.set, key, value)

    def get(self, key: str) -> bytes:
        return self._call(self.inner.get, key)

    def add(self, key: str, value: int) -> int:
        return self._call(self.inner.add, key, value)

    def compare_set(
        self, key: str, expected_value: str | bytes, desired_value: str | bytes
    ) -> bytes:
        return self._call(self.inner.compare_set, key, expected_value, desired_value)

    def check(self, keys: Sequence[str]) -> bool:
        return self._call(self.inner.check, list(keys))

    def wait(self, keys: Sequence[str], timeout: timedelta | float | None = None) -> None:
        limit = self._deadline(timeout).seconds
        self._call(self.inner.wait, list(keys), timedelta(seconds=limit))

    def delete_key(self, key: str) -> bool:
        return self._call(self.inner.delete_key, key)

    def num_keys(self) -> int:
        return self._call(self.inner.num_keys)

    def list_keys(self) -> list[str]:
        return sorted(self._call(self.inner.list_keys))

    def append(self, key: str, value: str | bytes) -> None:
        self._call(self.inner.append, key, value)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return self._call(self.inner.multi_get, list(keys))

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        names, items = (
            zip(*pairs, strict=True) if (pairs := self._pairs(keys, values)) else ((), ())
        )
        self._call(self.inner.multi_set, list(names), list(items))

    def queue_push(self, key: str, value: str | bytes) -> None:
        self._call(self.inner.queue_push, key, value)

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        return self._call(self.inner.queue_pop, key, block)

    def queue_len(self, key: str) -> int:
        return self._call(self.inner.queue_len, key)

    def barrier(self, key: str, world_size: int, timeout: timedelta | float | None = None) -> None:
        limit = timedelta(seconds=self._deadline(timeout).seconds)
        self._call(self.inner.barrier, key, self._barrier_size(world_size), limit)

    def has_extended_api(self) -> bool:
        return self.inner.has_extended_api()

    def set_timeout(self, timeout: timedelta | float) -> None:
        super().set_timeout(timeout)
        self.inner.set_timeout(self._timeout)

    @property
    def timeout(self) -> timedelta:
        """How long operations wait: the torch store's timeout."""
        return self.inner.timeout

    def _where(self) -> str:
        return f"torch's {type(self.inner).__name__}"
