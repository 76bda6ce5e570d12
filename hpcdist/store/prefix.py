"""A view of another store in which all keys begin with one prefix."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from ._common import Timeout, key_list, key_of
from .base import Store, Value


class PrefixStore(Store):
    """Another store seen through a prefix: the key ``k`` is ``prefix/k`` there.

    Libraries with different prefixes can share a store without collisions.
    ``num_keys`` and ``list_keys`` speak of this prefix only, and ``list_keys`` leaves it off. The
    timeout is the underlying store's.

    Parameters
    ----------
    prefix : str
        The beginning of all keys; a slash follows it.
    store : Store
        The underlying store; may be a PrefixStore itself.

    Notes
    -----
    Local to this process. Source: ``torch.distributed.PrefixStore``.
    """

    def __init__(self, prefix: str, store: Store) -> None:
        if not isinstance(store, Store):
            raise TypeError(
                f"PrefixStore needs an hpcdist store, not {type(store).__name__}; for one of "
                "torch's there is hpcdist.torch.store.from_torch"
            )
        self._prefix = key_of(prefix) + "/"
        self._store = store

    @property
    def underlying_store(self) -> Store:
        """The store it was made from."""
        return self._store

    @property
    def _underlying_non_prefix_store(self) -> Store:
        """The first store below that is no PrefixStore; torch's code asks for it."""
        store: Store = self._store
        while isinstance(store, PrefixStore):
            store = store._store
        return store

    @property
    def _waits_quietly(self) -> bool:  # type: ignore[override]
        return self._store._waits_quietly

    def _name(self, key: str) -> str:
        return self._prefix + key_of(key)

    def _names(self, keys: Sequence[str]) -> list[str]:
        return [self._prefix + key for key in key_list(keys)]

    def set(self, key: str, value: Value) -> None:
        self._store.set(self._name(key), value)

    def get(self, key: str) -> bytes:
        return self._store.get(self._name(key))

    def add(self, key: str, value: int) -> int:
        return self._store.add(self._name(key), value)

    def compare_set(self, key: str, expected_value: Value, desired_value: Value) -> bytes:
        return self._store.compare_set(self._name(key), expected_value, desired_value)

    def check(self, keys: Sequence[str]) -> bool:
        return self._store.check(self._names(keys))

    def wait(self, keys: Sequence[str], timeout: Timeout | None = None) -> None:
        if timeout is None:
            self._store.wait(self._names(keys))
        else:
            self._store.wait(self._names(keys), timeout)

    def delete_key(self, key: str) -> bool:
        return self._store.delete_key(self._name(key))

    def append(self, key: str, value: Value) -> None:
        self._store.append(self._name(key), value)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return self._store.multi_get(self._names(keys))

    def multi_set(self, keys: Sequence[str], values: Sequence[Value]) -> None:
        self._store.multi_set(self._names(keys), values)

    def queue_push(self, key: str, value: Value) -> None:
        self._store.queue_push(self._name(key), value)

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        return self._store.queue_pop(self._name(key), block)

    def queue_len(self, key: str) -> int:
        return self._store.queue_len(self._name(key))

    def barrier(self, key: str, world_size: int, timeout: Timeout | None = None) -> None:
        self._store.barrier(self._name(key), world_size, timeout)

    def num_keys(self) -> int:
        return self._store._count_below(self._prefix)

    def list_keys(self) -> list[str]:
        return self._keys_below("")

    def clone(self) -> PrefixStore:
        return PrefixStore(self._prefix[:-1], self._store.clone())

    def has_extended_api(self) -> bool:
        return self._store.has_extended_api()

    def set_timeout(self, timeout: Timeout) -> None:
        self._store.set_timeout(timeout)

    @property
    def timeout(self) -> timedelta:
        """The time limit of operations: the underlying store's."""
        return self._store.timeout

    def _keys_below(self, prefix: str) -> list[str]:
        cut = len(self._prefix)
        return [key[cut:] for key in self._store._keys_below(self._prefix + prefix)]

    def _count_below(self, prefix: str) -> int:
        return self._store._count_below(self._prefix + prefix)

    def _where(self) -> str:
        return f"PrefixStore {self._prefix} of {self._store._where()}"


def prefixed(store: Any, prefix: str) -> Any:
    """Return the view of a store behind a prefix, for hpcdist's stores and torch's.

    None, where the processes met without a store, stays None.
    """
    if store is None:
        return None
    if isinstance(store, Store):
        return PrefixStore(prefix, store)
    torch = sys.modules.get("torch.distributed")
    if torch is not None and isinstance(store, torch.Store):
        return torch.PrefixStore(prefix, store)
    raise TypeError(
        f"store must be an hpcdist.Store (derive yours from it) or one of torch.distributed's, not "
        f"{type(store).__name__}"
    )
