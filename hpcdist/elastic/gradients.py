"""The gradients to which a step adds: those of the last commit are then a part of the state.

Most steps drop the gradients that they find, and a copy of these would be of no use. So commits
have copies only until some steps in a row have done so, and again from the first one on that has
not.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from hpcdist.elastic.sharded import is_shard, like, local
from hpcdist.errors import DistError

#: Entries of what is taken: a copy per parameter, or None if steps drop them; which one it is.
COPIES, NUMBER = "copies", "number"
#: In place of a number: FSDP2 has gradients of its own, of which there is no copy.
_WAITING = -1
#: So many steps in a row have to drop them. Where steps add to them, no two in a row do.
_IN_A_ROW = 3
#: So many of the last commits are remembered: one and the next, until all have voted for it.
_REMEMBERED = 4

#: What to do where there is no copy.
_INSTEAD = "load a checkpoint, and commit after optimizer.step() only (every= of elastic)"

#: Where a gradient lies, and how often it has been changed.
_Mark = tuple[StorageWeakRef, int]


class Gradients:
    """Learns whether steps add to the gradients that they find, and copies them then; local."""

    def __init__(self) -> None:
        #: Whether they do; None until it is known.
        self._added: bool | None = None
        self._dropped = 0
        #: Whether gradients were put back since: dropped copies tell nothing of a bucket's views.
        self._were_put_back = False
        self._marks: dict[int, list[_Mark | None]] = {}
        self._numbers = itertools.count()
        #: The last commit's: where they lie and, until it is known, they themselves.
        self._last: list[_Mark | None] = []
        self._held: list[tuple[torch.Tensor, int]] = []

    def take(self, parameters: Sequence[torch.Tensor], waiting: bool = False) -> dict[str, Any]:
        """Return what a commit has of them; with `waiting` not all are there yet."""
        found = [_gradient(parameter) for parameter in parameters]
        now = [None if each is None else _mark(each) for each in found]
        self._learn(now)
        if any(map(_has_graph, parameters)):
            self._added = True  # backward adds to it in another place, which looks like a drop
        number = next(self._numbers)
        self._marks[number] = now
        self._marks.pop(number - _REMEMBERED, None)
        self._begin(found, now)
        if waiting:
            return {COPIES: None, NUMBER: _WAITING}
        if self._added is False:
            return {COPIES: None, NUMBER: number}
        copies = [None if each is None else each.clone() for each in found]
        return {COPIES: copies if any(now) else [], NUMBER: number}

    def _begin(self, found: list[torch.Tensor | None], now: list[_Mark | None]) -> None:
        """A step begins with these gradients."""
        self._last = now
        self._held = []
        if self._added is None:
            self._held = [(each, each._version) for each in found if each is not None]

    def _learn(self, now: list[_Mark | None]) -> None:
        """A step has ended with these gradients; or they were put back, and nothing is new."""
        pairs = list(zip(self._last, now, strict=False))
        # a bucket makes new views, whose counts of changes begin at zero
        stay = [_same(a, b) for a, b in pairs if a is not None and b is not None]
        changed = any(each._version != version for each, version in self._held)
        if not any(self._last) or (all(_untouched(*pair) for pair in pairs) and not changed):
            return
        if changed or any(stay):
            self._added = True
        elif self._added is None and not self._were_put_back:
            self._dropped += 1
            if self._dropped == _IN_A_ROW:
                self._added = False
        self._were_put_back = False

    def put_back(self, parameters: Sequence[torch.Tensor], taken: dict[str, Any] | None) -> None:
        """Put the gradients of a commit in place.

        Raises
        ------
        DistError
            If the commit has no copy, and the failed step was the first one to change them, or
            FSDP2 had not reduced them.
        """
        taken = taken or {COPIES: []}  # an earlier version's
        copies = taken[COPIES]
        if taken.get(NUMBER) == _WAITING:
            raise DistError(
                "the last commit has no copy of the gradients that FSDP2 had not reduced yet "
                f"(set_requires_gradient_sync(False)): {_INSTEAD}"
            )
        if copies is None:
            left = self._left(parameters, taken[NUMBER])
        else:
            left = [None] * len(parameters)
            for index, (parameter, saved) in enumerate(zip(parameters, copies, strict=False)):
                if saved is not None:
                    there = torch.empty_like(saved, device=local(parameter).device).copy_(saved)
                    left[index] = like(parameter, there)
        for parameter, gradient in zip(parameters, left, strict=True):
            parameter.grad = gradient
        found = [_gradient(parameter) for parameter in parameters]
        self._begin(found, [None if each is None else _mark(each) for each in found])
        self._were_put_back = True

    def _left(self, parameters: Sequence[torch.Tensor], number: int) -> list[Any]:
        """Return the gradients that the failed step has left as they were at a commit."""
        marks = self._marks.get(number, [None] * len(parameters))
        left: list[Any] = []
        for parameter, mark in zip(parameters, marks, strict=True):
            found = _gradient(parameter)
            stays = mark is not None and found is not None and _same(mark, _mark(found))
            changed = stays and mark is not None and found is not None and found._version != mark[1]
            if changed or (mark is not None and _has_graph(parameter)):
                raise DistError(
                    "the step that failed has added to the gradients of the step before, and the "
                    "last commit has no copy of these, because the steps before dropped theirs: "
                    f"{_INSTEAD}"
                )
            left.append(parameter.grad if stays else None)
        return left


def _gradient(parameter: torch.Tensor) -> torch.Tensor | None:
    """Return a parameter's gradient on this rank; None if it is none that a commit can have."""
    gradient = parameter.grad
    if gradient is None or gradient.layout is not torch.strided:
        return None
    if type(gradient) is torch.Tensor:
        return gradient  # most are: a commit looks at each
    if is_shard(gradient) and gradient.placements != parameter.placements:  # type: ignore[attr-defined]
        return None
    return local(gradient)


def _has_graph(parameter: torch.Tensor) -> bool:
    """Whether a backward with ``create_graph=True`` has made its gradient."""
    return parameter.grad is not None and parameter.grad.requires_grad


def _mark(gradient: torch.Tensor) -> _Mark:
    return StorageWeakRef(gradient.untyped_storage()), gradient._version


def _untouched(one: _Mark | None, other: _Mark | None) -> bool:
    if one is None or other is None:
        return one is other
    return _same(one, other) and one[1] == other[1]


def _same(one: _Mark, other: _Mark) -> bool:
    """Whether two gradients share memory: the first one's has not been freed."""
    return bool(not one[0].expired() and one[0].cdata == other[0].cdata)
