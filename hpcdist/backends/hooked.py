"""A carrier with hooks: it calls them around each operation that it forwards.

It takes the place of a group's carrier, so that a group without hooks pays nothing for them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from hpcdist.errors import mark_told
from hpcdist.operations import OPERATIONS

from .dispatch import Dispatch, agreeing, withdrawing


class Around(Protocol):
    """What is called around an operation."""

    def begins(
        self, name: str, async_op: bool, inputs: list[Any], outputs: list[Any], root: int
    ) -> Any:
        """An operation is about to begin; returns what :meth:`has_begun` gets."""

    def has_begun(self, seen: Any, result: Any) -> None:
        """It has begun, and, unless it is asynchronous, has ended."""


def _flat(given: Any) -> list[Any]:
    """Return the tensors of an argument: one, a list, a list of lists, or None."""
    if isinstance(given, (list, tuple)):
        return [tensor for each in given for tensor in _flat(each)]
    return [] if given is None else [given]


class Hooked(Dispatch):
    """Calls hooks around each operation that it forwards.

    Parameters
    ----------
    backends : dict
        Device type to backend: those of the group.
    hooks : Around
        What it calls.
    """

    def __init__(self, backends: dict[str, Any], hooks: Around) -> None:
        super().__init__(backends)
        self._hooks = hooks

    def _announce(self, operation: str, args: Sequence[Any], about: dict[str, Any]) -> Any:
        """Call the hooks before an operation; the other ranks learn of an error in one."""
        places = OPERATIONS[operation]

        def given(place: int | None, default: Any = None) -> Any:
            return args[place] if place is not None and place < len(args) else default

        root, name = given(places.root, -1), about.get("api") or operation
        asynchronous = operation in ("isend", "irecv") or bool(
            about.get("async_op", given(places.asynchronous, False))
        )
        inputs, outputs = _flat(given(places.inputs)), _flat(given(places.outputs))
        try:
            return self._hooks.begins(
                name, asynchronous, inputs, outputs, -1 if root is None else root
            )
        except Exception as error:
            if not operation.endswith(("send", "recv")):
                agreeing(self, given(places.inputs)).refuse(error, api=name)
            raise

    def batch_isend_irecv(self, operations: Sequence[tuple[bool, Any, int, int]]) -> list[Any]:
        """Begin messages, with the hooks of each."""
        seen = [
            self._announce("isend" if sends else "irecv", (tensor, peer, tag), {})
            for sends, tensor, peer, tag in operations
        ]
        works = super().batch_isend_irecv(operations)
        with withdrawing(works):
            for each, work in zip(seen, works, strict=True):
                self._hooks.has_begun(each, work)
        return works

    def barrier(self, *args: Any, **about: Any) -> Any:
        """Wait until all ranks have called, with hooks."""
        seen = self._announce("barrier", args, about)
        result = self._host.barrier(*args, **about)
        self._has_begun(seen, result)
        return result

    def _has_begun(self, seen: Any, result: Any) -> None:
        """Call the hooks after an operation; if one raises, it is not to be made again."""
        try:
            self._hooks.has_begun(seen, result)
        except Exception as error:
            mark_told(error)
            raise


def _with_hooks(operation: str) -> Callable[..., Any]:
    forward = getattr(Dispatch, operation)

    def method(self: Hooked, *args: Any, **about: Any) -> Any:
        seen = self._announce(operation, args, about)
        result = forward(self, *args, **about)
        self._has_begun(seen, result)
        return result

    method.__name__ = operation
    return method


for _operation in OPERATIONS:
    if _operation != "barrier":
        setattr(Hooked, _operation, _with_hooks(_operation))
