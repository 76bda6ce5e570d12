"""Hooks of a group: functions that it calls before and after it begins an operation."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from hpcdist.backends.carrier import Carrier
from hpcdist.backends.dispatch import combine
from hpcdist.backends.hooked import Hooked
from hpcdist.groups.abort_hooks import AbortHooks


@dataclass(frozen=True)
class PreHookArgs:
    """An operation that is about to begin.

    Attributes
    ----------
    name : str
        Public name of the operation, such as ``"all_reduce"``.
    async_op : bool
        Whether the caller gets a handle.
    input_tensors, output_tensors : list
        What the operation reads and writes on this rank.
    root : int
        Rank in the group of the root or the peer; -1 for operations without one.
    op_id : int
        Number of the operation, the same in its :class:`PostHookArgs`.
    """

    name: str
    async_op: bool
    input_tensors: list[Any]
    output_tensors: list[Any]
    root: int
    op_id: int


@dataclass(frozen=True)
class PostHookArgs:
    """An operation that has begun, and, unless it is asynchronous, has ended.

    Attributes
    ----------
    name : str
        See :class:`PreHookArgs`.
    async_op : bool
        See :class:`PreHookArgs`.
    work : Work or None
        The handle, if the caller gets one.
    op_id : int
        See :class:`PreHookArgs`.
    """

    name: str
    async_op: bool
    work: Any
    op_id: int


class Hooks:
    """The hooks of one group, by the number under which each was registered.

    Attributes
    ----------
    changing : threading.RLock
        Held from a registration or removal until the group's operations follow it: another
        thread's would be undone by one that has looked earlier. A signal handler may come between.
    aborting : AbortHooks
        What is called when ranks die.
    """

    def __init__(self) -> None:
        self.changing = threading.RLock()
        self._by_kind: dict[str, dict[int, Callable[..., None]]] = {"pre": {}, "post": {}}
        self.aborting = AbortHooks()
        self._numbers = itertools.count()
        #: The generations in which the abort hooks have been called.
        self._aborted: set[int] = set()

    def add(self, kind: str, hook_id: int, hook: Callable[..., None]) -> None:
        """Register a hook, ``pre`` or ``post``."""
        if not callable(hook):
            raise TypeError(f"a hook must be callable, not {type(hook).__name__}")
        if hook_id in self._by_kind[kind]:
            raise ValueError(f"a hook {hook_id} is registered already: choose another number")
        self._by_kind[kind][hook_id] = hook

    def remove(self, kind: str, hook_id: int, name: str) -> None:
        """Remove a hook of the group of this name, or raise ValueError."""
        if self._by_kind[kind].pop(hook_id, None) is None:
            raise ValueError(f"no hook {hook_id} is registered with the group {name!r}")

    def clear(self) -> None:
        """Forget what was registered, and what it refers to: the group is gone."""
        for hooks in self._by_kind.values():
            hooks.clear()

    def remove_abort(self, hook_id: int) -> None:
        """Remove an abort hook, or raise ValueError."""
        if not self.aborting.remove(hook_id):
            raise ValueError(f"no abort hook {hook_id} is registered")

    def carry(self, backends: dict[str, Any]) -> Carrier:
        """Return what a group's operations call: with a hook before or after them, or without."""
        if self._by_kind["pre"] or self._by_kind["post"]:
            return cast(Carrier, Hooked(backends, self))
        return combine(backends)

    def begins(
        self, name: str, async_op: bool, inputs: list[Any], outputs: list[Any], root: int
    ) -> PreHookArgs:
        """Call the hooks before an operation."""
        seen = PreHookArgs(name, async_op, inputs, outputs, root, next(self._numbers))
        for hook in list(self._by_kind["pre"].values()):
            hook(seen)
        return seen

    def has_begun(self, seen: PreHookArgs, result: Any) -> None:
        """Call the hooks after an operation has begun."""
        work = result if seen.async_op else None
        for hook in list(self._by_kind["post"].values()):
            hook(PostHookArgs(seen.name, seen.async_op, work, seen.op_id))

    def abort(self, generation: int, name: str) -> None:
        """Call the abort hooks, once for each recovery, also if its first attempt timed out."""
        if generation not in self._aborted:
            self._aborted.add(generation)
            self.aborting.call(name)
