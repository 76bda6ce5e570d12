"""Functions that a group calls before it is aborted."""

from __future__ import annotations

from collections.abc import Callable

from hpcdist.log import get_logger

_log = get_logger("group")


class AbortHooks:
    """The abort hooks of one group, by number."""

    def __init__(self) -> None:
        self._hooks: dict[int, Callable[[], None]] = {}

    def add(self, hook_id: int, hook: Callable[[], None]) -> None:
        """Add a hook.

        Raises
        ------
        TypeError
            If it is not callable.
        ValueError
            If its number is in use.
        """
        if not callable(hook):
            raise TypeError(f"a hook must be callable, not {type(hook).__name__}")
        if hook_id in self._hooks:
            raise ValueError(f"abort hook {hook_id} is registered already: choose another number")
        self._hooks[hook_id] = hook

    def remove(self, hook_id: int) -> bool:
        """Remove a hook, and return whether there was one of that number."""
        return self._hooks.pop(hook_id, None) is not None

    def call(self, group: str) -> None:
        """Call the hooks of a group of this name, in the order in which they were added."""
        for hook_id, hook in list(self._hooks.items()):
            try:
                hook()
            except Exception:
                _log.exception("abort hook %s of group '%s' raised", hook_id, group)
