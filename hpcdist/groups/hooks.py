"""Hooks of a group: functions that it calls before and after it begins an operation.

A group with hooks has a :class:`Hooked` in the place of its communicator, so that one without hooks
pays nothing for them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from hpcdist import log
from hpcdist.backends.carrier import Carrier
from hpcdist.backends.dispatch import Dispatch, agreeing, combine
from hpcdist.errors import DistBackendError
from hpcdist.groups.members import Members
from hpcdist.operations import OPERATIONS

__all__ = ["Hooked", "PostHookArgs", "PreHookArgs", "WithHooks"]


_log = log.get_logger("group")


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


def _flat(given: Any) -> list[Any]:
    """Return the tensors of an argument: one, a list, a list of lists, or None."""
    if isinstance(given, (list, tuple)):
        return [tensor for each in given for tensor in _flat(each)]
    return [] if given is None else [given]


@dataclass
class Hooks:
    """The hooks of one group, by the number under which each was registered."""

    before: dict[int, Callable[[PreHookArgs], None]] = field(default_factory=dict)
    after: dict[int, Callable[[PostHookArgs], None]] = field(default_factory=dict)
    numbers: Any = field(default_factory=itertools.count)


class Hooked(Dispatch):
    """Calls hooks around each operation that it forwards.

    Parameters
    ----------
    backends : dict
        Device type to backend: those of the group.

    Attributes
    ----------
    hooks : Hooks
        What it calls.
    """

    def __init__(self, backends: dict[str, Any]) -> None:
        super().__init__(backends)
        self.hooks = Hooks()

    def _announce(self, operation: str, args: Sequence[Any], about: dict[str, Any]) -> PreHookArgs:
        """Call the hooks before an operation; the other ranks learn of an error in one."""
        places = OPERATIONS[operation]

        def given(place: int | None, default: Any = None) -> Any:
            return args[place] if place is not None and place < len(args) else default

        root = given(places.root, -1)
        seen = PreHookArgs(
            about.get("api") or operation,
            operation in ("isend", "irecv")
            or bool(about.get("async_op", given(places.asynchronous, False))),
            _flat(given(places.inputs)),
            _flat(given(places.outputs)),
            -1 if root is None else root,
            next(self.hooks.numbers),
        )
        try:
            for hook in list(self.hooks.before.values()):
                hook(seen)
        except Exception as error:
            if not operation.endswith(("send", "recv")):
                agreeing(self, given(places.inputs)).refuse(error, api=seen.name)
            raise
        return seen

    def _report(self, seen: PreHookArgs, result: Any) -> None:
        work = result if seen.async_op else None
        for hook in list(self.hooks.after.values()):
            hook(PostHookArgs(seen.name, seen.async_op, work, seen.op_id))

    def batch_isend_irecv(self, operations: Sequence[tuple[bool, Any, int, int]]) -> list[Any]:
        """Begin messages, with the hooks of each."""
        seen = [
            self._announce("isend" if sends else "irecv", (tensor, peer, tag), {})
            for sends, tensor, peer, tag in operations
        ]
        works = super().batch_isend_irecv(operations)
        for each, work in zip(seen, works, strict=True):
            self._report(each, work)
        return works

    def barrier(self, *args: Any, **about: Any) -> Any:
        """Wait until all ranks have called, with hooks."""
        seen = self._announce("barrier", args, about)
        result = self._host.barrier(*args, **about)
        self._report(seen, result)
        return result


def _with_hooks(operation: str) -> Callable[..., Any]:
    forward = getattr(Dispatch, operation)

    def method(self: Hooked, *args: Any, **about: Any) -> Any:
        seen = self._announce(operation, args, about)
        result = forward(self, *args, **about)
        self._report(seen, result)
        return result

    method.__name__ = operation
    return method


for _operation in OPERATIONS:
    if _operation != "barrier":
        setattr(Hooked, _operation, _with_hooks(_operation))


class WithHooks:
    """The part of :class:`hpcdist.ProcessGroup` that registers hooks."""

    __slots__ = ()

    # of ProcessGroup
    _backends: dict[str, Any]
    carrier: Carrier
    members: Members

    supports_completion_hooks = False
    # of Reconfigurable
    supports_abort_hooks: Any
    # of ProcessGroup
    _abort_hooks: dict[int, Callable[[], None]]
    _hold: Callable[[], None]
    _use: Callable[[Carrier], None]
    _aborted: set[int]

    def register_pre_hook(self, hook_id: int, hook: Callable[[PreHookArgs], None]) -> None:
        """Call a function before each operation of this group begins on this rank.

        Local; ranks may have different hooks. Operations that hpcdist makes itself count, such as
        the all-reduces of DistributedDataParallel; ``monitored_barrier``, windows and
        ``hpcdist.empty`` do not. An ``Exception`` in a hook is also raised on
        the other ranks. After ``KeyboardInterrupt`` and other exceptions that are none, the call
        has not been made: the others wait for it, and this rank may make it again.

        Parameters
        ----------
        hook_id : int
            A number for :meth:`unregister_pre_hook`, not in use yet.
        hook : callable
            Takes a :class:`~hpcdist.groups.hooks.PreHookArgs`.

        Raises
        ------
        ValueError
            If a hook of this number is registered, or the group was destroyed.

        Notes
        -----
        Source: ``torch.distributed.ProcessGroup.register_pre_hook`` of torch 2.15.
        """
        self._register("before", hook_id, hook)

    def register_post_hook(self, hook_id: int, hook: Callable[[PostHookArgs], None]) -> None:
        """Call a function after each operation of this group has begun on this rank.

        Local; an operation that is not asynchronous has ended by then.

        Parameters
        ----------
        hook_id : int
            A number for :meth:`unregister_post_hook`, not in use yet.
        hook : callable
            Takes a :class:`~hpcdist.groups.hooks.PostHookArgs`.

        Notes
        -----
        Errors as in :meth:`register_pre_hook`. Source:
        ``torch.distributed.ProcessGroup.register_post_hook`` of torch 2.15.
        """
        self._register("after", hook_id, hook)

    def unregister_pre_hook(self, hook_id: int) -> None:
        """Remove a hook; a number that is not in use raises ValueError.

        Parameters
        ----------
        hook_id : int
            The number of :meth:`register_pre_hook`.
        """
        self._unregister("before", hook_id)

    def unregister_post_hook(self, hook_id: int) -> None:
        """Remove a hook; a number that is not in use raises ValueError.

        Parameters
        ----------
        hook_id : int
            The number of :meth:`register_post_hook`.
        """
        self._unregister("after", hook_id)

    def register_abort_hook(self, hook_id: int, hook: Callable[[], None]) -> None:
        """Call a function before :meth:`reconfigure` ends the group's operations on this rank.

        Local; for what the program has to put in order before the ranks go on. An exception in it
        is logged, and does not stop the others.

        Parameters
        ----------
        hook_id : int
            A number for :meth:`unregister_abort_hook`, not in use yet.
        hook : callable
            Takes nothing.

        Raises
        ------
        DistBackendError
            If the job ends when a rank dies (``supports_abort_hooks`` is False): native code does
            that, which calls no Python.

        Notes
        -----
        Source: ``torch.distributed.ProcessGroup.register_abort_hook`` of torch 2.15.
        """
        if not self.supports_abort_hooks:
            raise DistBackendError(
                f"the process group {self.members.name!r} has no abort hooks (supports_abort_hooks "
                "is False): hpcdist ends the job from native code, which cannot run Python safely; "
                "in a job that goes on after a death (HPCDIST_FT=1) it has"
            )
        if not callable(hook):
            raise TypeError(f"a hook must be callable, not {type(hook).__name__}")
        if hook_id in self._abort_hooks:
            raise ValueError(f"a hook {hook_id} is registered already: choose another number")
        self._abort_hooks[hook_id] = hook
        self._hold()  # reconfigure() calls it

    def unregister_abort_hook(self, hook_id: int) -> None:
        """Remove a hook.

        Parameters
        ----------
        hook_id : int
            The number of :meth:`register_abort_hook`.

        Raises
        ------
        ValueError
            If that number is not in use.
        """
        if self._abort_hooks.pop(hook_id, None) is None:
            raise ValueError(f"no abort hook {hook_id} is registered")

    def _call_abort_hooks(self) -> None:
        """Once for each recovery, also if its first attempt timed out."""
        if self.members.generation in self._aborted:
            return
        self._aborted.add(self.members.generation)
        for hook in list(self._abort_hooks.values()):
            try:
                hook()
            except Exception:
                _log.exception("an abort hook of the group %r failed", self.members.name)

    def _register(self, kind: str, hook_id: int, hook: Any) -> None:
        if not self._backends:
            raise ValueError(f"the process group {self.members.name!r} has been destroyed")
        if not callable(hook):
            raise TypeError(f"a hook must be callable, not {type(hook).__name__}")
        hooked = self.carrier if isinstance(self.carrier, Hooked) else Hooked(self._backends)
        hooks = getattr(hooked.hooks, kind)
        if hook_id in hooks:
            raise ValueError(f"a hook {hook_id} is registered already: choose another number")
        hooks[hook_id] = hook
        self._use(cast(Carrier, hooked))

    def _unregister(self, kind: str, hook_id: int) -> None:
        hooks = self.carrier.hooks if isinstance(self.carrier, Hooked) else Hooks()
        if getattr(hooks, kind).pop(hook_id, None) is None:
            name = self.members.name
            raise ValueError(f"no hook {hook_id} is registered with the group {name!r}")
        if not hooks.before and not hooks.after:
            self._use(combine(self._backends))
