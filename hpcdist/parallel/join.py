"""Uneven inputs: ranks that are done shadow the collectives of those that still train."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
import torch

from hpcdist._ops import ReduceOp
from hpcdist.backends.dispatch import agreeing
from hpcdist.backends.refusal import refusing
from hpcdist.groups.comparison import same_arguments
from hpcdist.groups.numbers import yes_or_no
from hpcdist.groups.process_group import ProcessGroup

# Name of the operation in error messages.
API = "Join"
# Steps that a rank shadows before it warns that the inputs are far too uneven.
_MANY = 1000


class JoinHook:
    """The actions of one :class:`Joinable` on a rank that has no inputs left.

    Derive from it and override what is needed; both methods do nothing by default.

    Notes
    -----
    Source: ``torch.distributed.algorithms.join.JoinHook``.
    """

    # Whether the step that `main_hook` shadowed last averaged gradients; None: it averages none.
    _averaged: bool | None = None
    # Whether those that train leave out this one's step if none before it averages.
    _follows_averages = False

    def main_hook(self) -> None:
        """Shadow the collectives of one training step; called while any rank still trains.

        Called on the ranks that are done. It must make exactly the collectives that forward,
        backward and optimizer step make on the others.
        """

    def post_hook(self, is_last_joiner: bool) -> None:
        """Bring all ranks to the same state; called once, after all ranks are done.

        All ranks of the group run it together.

        Parameters
        ----------
        is_last_joiner : bool
            Whether this rank trained to the end, so that its state is copied to the others.
        """


#: The joinables of the blocks that this process is in.
_entered: list[Joinable] = []


class _JoinConfig(NamedTuple):
    enable: bool = False
    throw_on_early_termination: bool = False
    is_first_joinable: bool = False
    hook: Any = None


class Joinable(ABC):
    """Base class of objects that can be trained inside :class:`Join`.

    A class that derives from it calls :meth:`Join.notify_join_context` before the first collective
    of each training step. Its constructor must call this one.

    Notes
    -----
    Source: ``torch.distributed.algorithms.join.Joinable``.
    """

    @abstractmethod
    def __init__(self) -> None:
        super().__init__()
        self._join_config = _JoinConfig()

    @abstractmethod
    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Make the hook that shadows this object's collectives.

        Local to this process.

        Parameters
        ----------
        **kwargs
            Further arguments of :class:`Join`; the same for all joinables.

        Returns
        -------
        JoinHook
            A new one.
        """

    @property
    @abstractmethod
    def join_device(self) -> torch.device:
        """The device of this object's collectives."""

    @property
    @abstractmethod
    def join_process_group(self) -> Any:
        """The group of this object's collectives, a ``ProcessGroup``."""


class Join:
    """Let ranks with different numbers of batches train together.

    All ranks of the group must enter and leave it. A rank that leaves the block runs the hooks of
    all joinables again and again, until the last rank has left; then all run the post-hooks.

    Parameters
    ----------
    joinables : sequence of Joinable
        :class:`~hpcdist.DistributedDataParallel`, :class:`~hpcdist.optim.ZeroRedundancyOptimizer`,
        or your own; in the order in which a training step uses them, the same on all ranks.
    enable : bool
        False: do nothing; for inputs that are known to be even.
    throw_on_early_termination : bool
        Raise on all ranks as soon as one has no inputs left, instead of shadowing. It costs a
        synchronous exchange per step.
    **kwargs
        Passed to every ``join_hook``, such as ``divide_by_initial_world_size`` for DDP. Ranks
        compare plain values, and the types of other objects.

    Raises
    ------
    ValueError
        If there is no joinable, they have different groups, or one is in the block of another Join.
    TypeError
        If a flag is not a boolean.
    RuntimeError
        With `throw_on_early_termination`: on the rank that ran out of inputs at the end of the
        block, on the others at their next step.
    DistMismatchError
        On all ranks, if they enter it with different arguments, or if a step makes collectives that
        no hook shadows, for instance an ``all_reduce`` of the loss inside the block. On the others,
        if one rank raises because of its arguments.

    Notes
    -----
    Source: ``torch.distributed.algorithms.join.Join``. Unlike there, a joinable is independent
    again after the block, and the filters of ``warnings`` are not changed. An exception inside the
    block propagates; the other ranks then time out.

    Examples
    --------
    >>> with Join([model, optimizer]):
    ...     for x, y in batches:
    ...         optimizer.zero_grad()
    ...         loss(model(x), y).backward()
    ...         optimizer.step()
    """

    def __init__(
        self,
        joinables: Sequence[Joinable],
        enable: bool = True,
        throw_on_early_termination: bool = False,
        **kwargs: Any,
    ) -> None:
        self._joinables = list(joinables)
        if not self._joinables:
            raise ValueError("Join needs at least one joinable")
        groups = [joinable.join_process_group for joinable in self._joinables]
        if any(group is not groups[0] for group in groups):
            raise ValueError(
                "all joinables of a Join must have the same process group, but these have "
                f"{', '.join(sorted({repr(group.name) for group in groups}))}"
            )
        self._group = groups[0]
        with refusing(agreeing(self._group.carrier), API):  # the others enter the block, and wait
            self._enable = yes_or_no(enable, "enable")
            self._throw = yes_or_no(throw_on_early_termination, "throw_on_early_termination")
            self._hooks = [joinable.join_hook(**kwargs) for joinable in self._joinables]
            self._refuse_nested()
        self._facts = {"throw_on_early_termination": self._throw, **kwargs}

    def _refuse_nested(self) -> None:
        """Raise inside another block, whose ranks would shadow each step of this one as well."""
        nested = any(each is joinable for each in _entered for joinable in self._joinables)
        if self._enable and nested:
            raise ValueError(
                "a joinable is in the block of another Join already; make one Join of all "
                "joinables, or disable the inner one with enable=False"
            )

    def _set(self, enable: bool) -> None:
        for place, (joinable, hook) in enumerate(zip(self._joinables, self._hooks, strict=True)):
            joinable._join_config = (
                _JoinConfig(True, self._throw, place == 0, hook) if enable else _JoinConfig()
            )

    def __enter__(self) -> None:
        self._refuse_nested()
        if self._enable:  # a rank without it makes another call, which all ranks hear of
            same_arguments(self._group, API, self._facts)
            self._set(True)
            _entered.extend(self._joinables)

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if not self._enable:
            return
        own = {id(joinable) for joinable in self._joinables}
        _entered[:] = [each for each in _entered if id(each) not in own]
        self._set(False)
        if exc_type is not None:
            return
        shadowed = 0
        while True:
            training, _ = _count(self._group, 0, 1)
            if not training:
                break
            if self._throw:
                raise RuntimeError(
                    f"rank {self._rank()} exhausted all inputs while {training} of "
                    f"{self._group.size()} ranks have more, and throw_on_early_termination is set"
                )
            self._shadow()
            shadowed += 1
            if shadowed == _MANY:
                warnings.warn(
                    f"rank {self._rank()} has run out of inputs {_MANY} steps before others; "
                    "distribute the inputs more evenly, or this rank mostly waits",
                    stacklevel=2,
                )
        for hook in self._hooks:
            hook.post_hook(is_last_joiner=shadowed == 0)

    def _shadow(self) -> None:
        """Run the hooks of one step: an optimizer does not step under ``no_sync``."""
        averaged: list[bool] = []
        for hook in self._hooks:
            if averaged and not any(averaged) and getattr(hook, "_follows_averages", False):
                continue
            hook.main_hook()
            done = getattr(hook, "_averaged", None)
            averaged += [] if done is None else [done]

    def _rank(self) -> int:
        return int(self._group.members.ranks[self._group.rank()])

    @staticmethod
    def notify_join_context(joinable: Joinable) -> Any:
        """Notify the ranks that are done that this one begins another step.

        A joinable calls it before the first collective of a step, on all ranks that still train.
        Only the first joinable of a :class:`Join` communicates; for the others, and outside of any
        block, nothing happens.

        Parameters
        ----------
        joinable : Joinable
            The caller.

        Returns
        -------
        Work or None
            A handle whose ``result()[0][0]`` is the number of ranks that still train. None if
            nothing happened, and with ``throw_on_early_termination`` if no rank is done.

        Raises
        ------
        RuntimeError
            With ``throw_on_early_termination``, if a rank has no inputs left.

        Notes
        -----
        Source: ``torch.distributed.algorithms.join.Join.notify_join_context``.
        """
        config = getattr(joinable, "_join_config", None)
        if config is None:
            raise RuntimeError(
                f"the constructor of {type(joinable).__name__} must call Joinable.__init__"
            )
        if not (config.enable and config.is_first_joinable):
            return None
        group = joinable.join_process_group
        if config.throw_on_early_termination:
            _, exhausted = _count(group, 1, 0)
            if exhausted:
                raise RuntimeError(
                    f"{exhausted} of {group.size()} ranks exhausted their inputs; this rank, "
                    f"{group.members.ranks[group.rank()]}, and all others throw, because "
                    "throw_on_early_termination is set"
                )
            return None
        return group.carrier.all_reduce(np.array([1, 0], np.int64), ReduceOp.SUM, True, api=API)


def _count(group: ProcessGroup, training: int, exhausted: int) -> tuple[int, int]:
    """Return how many ranks still train, and how many are done. All ranks must call it."""
    counts = np.array([training, exhausted], np.int64)
    group.carrier.all_reduce(counts, ReduceOp.SUM, api=API)
    return int(counts[0]), int(counts[1])
