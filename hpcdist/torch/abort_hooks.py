"""Functions that a group of the bridge calls before it is aborted."""

from __future__ import annotations

from collections.abc import Callable

from hpcdist.log import get_logger

__all__ = ["AbortHooks"]


class AbortHooks:
    """The part of `BridgeGroup` that knows abort hooks: torch 2.15 has them on its groups."""

    supports_abort_hooks = True

    # of BridgeGroup
    _name: str
    _abort_hooks: dict[int, Callable[[], None]]

    def register_abort_hook(self, hook_id: int, hook: Callable[[], None]) -> None:
        """Call a function when this process aborts the group, before anything is freed.

        Local; ranks may have different hooks. An abort is a call of ``abort()`` in this process.
        Where a dead rank ends the whole job, native code ends it, without hooks.

        Parameters
        ----------
        hook_id : int
            A number for :meth:`unregister_abort_hook`, not in use yet.
        hook : callable
            Takes nothing. Its exception is logged, and the abort goes on.

        Raises
        ------
        TypeError
            If the hook is not callable.
        ValueError
            If a hook of this number is registered.
        """
        if not callable(hook):
            raise TypeError(f"a hook must be callable, not {type(hook).__name__}")
        if hook_id in self._abort_hooks:
            raise ValueError(f"abort hook {hook_id} is registered already: choose another number")
        self._abort_hooks[hook_id] = hook

    def unregister_abort_hook(self, hook_id: int) -> None:
        """Remove a hook; a number that is not in use is ignored, as torch ignores it.

        Parameters
        ----------
        hook_id : int
            The number of :meth:`register_abort_hook`.
        """
        self._abort_hooks.pop(hook_id, None)

    def _run_abort_hooks(self) -> None:
        """Call the hooks, each once, in the order of their registration."""
        hooks = list(self._abort_hooks.items())
        self._abort_hooks.clear()
        for hook_id, hook in hooks:
            try:
                hook()
            except Exception:
                get_logger("torch").exception(
                    "abort hook %s of group '%s' raised; the abort goes on", hook_id, self._name
                )
