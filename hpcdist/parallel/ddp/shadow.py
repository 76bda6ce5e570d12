"""Uneven inputs: a DistributedDataParallel without data shadows those that still train.

At the start of each step the ranks exchange whether they train, whether the step averages
gradients, and whether it synchronizes buffers. The ranks that are done then make the same
collectives, with zeros for gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from hpcdist._ops import ReduceOp
from hpcdist.backends.dispatch import agreeing
from hpcdist.backends.refusal import refusing_parts
from hpcdist.groups.numbers import yes_or_no
from hpcdist.groups.process_group import ProcessGroup
from hpcdist.parallel.join import Join, Joinable, JoinHook
from hpcdist.parallel.reducer.copies import unseen
from hpcdist.parallel.sync import packed, send

if TYPE_CHECKING:
    from hpcdist.parallel.ddp.buffers import Buffers
    from hpcdist.parallel.ddp.delayed import DelayedReduction
    from hpcdist.parallel.reducer.reducer import Reducer
    from hpcdist.parallel.reducer.stats import Stats

API = "DistributedDataParallel join"


class Step(NamedTuple):
    """The collectives of one step.

    Parameters
    ----------
    training : int
        Ranks that have data.
    averages : bool
        Whether gradients are averaged.
    buffers : bool
        Whether buffers are synchronized.
    root : int
        The highest group rank that has data: its buffers are copied.
    """

    training: int
    averages: bool
    buffers: bool
    root: int


def agree(
    group: ProcessGroup,
    training: bool,
    averages: bool = False,
    buffers: bool = False,
    new: bool = False,
) -> Step:
    """Exchange what all ranks do in this step. All ranks must call it.

    Parameters
    ----------
    group : ProcessGroup
        Between whose ranks.
    training, averages, buffers : bool
        This rank's, see :class:`Step`.
    new : bool
        Whether this rank has a static graph that it has not seen yet.

    Returns
    -------
    Step
        The same on all ranks.

    Raises
    ------
    RuntimeError
        On all ranks, if a rank that is done has not seen its static graph.
    """
    row = np.array([training, averages, buffers, new and not training], np.int64)
    rows = np.empty((group.size(), len(row)), np.int64)
    group.carrier.all_gather_into_tensor(rows, row, api=API)
    for rank in rows[:, 3].nonzero()[0].tolist():
        raise RuntimeError(
            f"rank {group.members.ranks[rank]} has run out of inputs before its first backward "
            "pass, which is where static_graph=True learns the graph; give every rank at least one "
            "batch"
        )
    present = rows[:, 0].nonzero()[0].tolist()
    return Step(
        len(present), bool(rows[:, 1].any()), bool(rows[:, 2].any()), max(present, default=0)
    )


class DDPJoinHook(JoinHook):
    """Shadows one DistributedDataParallel.

    Parameters
    ----------
    ddp : DistributedDataParallel
        The module.
    initial : bool
        Whether to divide by the number of ranks of the group, or by that of those that train.
    """

    def __init__(self, ddp: Any, initial: bool) -> None:
        self._ddp = ddp
        self.initial = initial
        # The gradients of this rank's own last step: the others' averages are for shadowing only.
        self._own: list[torch.Tensor | None] | None = None

    def main_hook(self) -> None:
        """Make the collectives of one forward and backward of the others."""
        ddp, reducer = self._ddp, self._ddp._the_reducer("join")
        step = agree(ddp.process_group, False, new=reducer.recording)
        ddp._take_step(step, self.initial)
        self._averaged = step.averages
        if step.averages:
            reducer.rebuild()
        if step.buffers:
            ddp._buffers_of_module.sync("PRE_FORWARD", step.root)
        ddp.require_forward_param_sync = step.averages
        if step.averages:
            if self._own is None:
                self._own = reducer.gradients()
            reducer.shadow()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Copy the parameters and buffers of a rank that trained to the end to all others."""
        group = self._ddp.process_group
        if self._own is not None:
            self._ddp._the_reducer("join").restore(self._own)
            self._own = None
        root = np.array([group.rank() if is_last_joiner else -1], np.int64)
        tensors = [t for _, t in self._ddp._synced(self._ddp.forward_sync_buffers)]
        packs, buffers = packed(tensors), tensors[len(self._ddp._synced(False)) :]
        with refusing_parts(agreeing(group.carrier), API, 1 + len(packs), waits=1), unseen(buffers):
            group.carrier.all_reduce(root, ReduceOp.MAX, api=API)
            if group.size() > 1:
                send(group, packs, int(root[0]), API)


class Uneven(Joinable):
    """The part of DistributedDataParallel for uneven inputs."""

    module: torch.nn.Module
    process_group: Any
    will_sync_module_buffers: Callable[[], bool]
    _delayed: DelayedReduction | None
    _buffers_of_module: Buffers
    _stats: Stats
    _the_reducer: Callable[[str], Reducer]

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """Let ranks with different numbers of inputs train together.

        Use it as a context around the training loop, on all ranks of the group. A rank that leaves
        it takes part in the others' collectives, with zeros, until all have left. Then the
        parameters of a rank that trained to the end are copied to all, but not the state of its
        optimizer: one with momentum must not be used after the block, unless it is a
        :class:`~hpcdist.optim.ZeroRedundancyOptimizer` in the same :class:`~hpcdist.parallel.Join`.

        Parameters
        ----------
        divide_by_initial_world_size : bool
            Divide gradients by the number of ranks of the group, so that each input has the same
            weight. False: by the number of ranks that still have inputs. A communication hook
            divides by itself: those of hpcdist always by the ranks of their group.
        enable : bool
            False: do nothing, for inputs that are known to be even.
        throw_on_early_termination : bool
            Raise on all ranks when the first one has no inputs left.

        Returns
        -------
        Join
            The context; see :class:`~hpcdist.parallel.Join` for several objects together.

        Raises
        ------
        RuntimeError
            With `throw_on_early_termination`, from forward or at the end of the context.

        Notes
        -----
        Source: ``torch.nn.parallel.DistributedDataParallel.join``.

        Examples
        --------
        >>> with model.join():
        ...     for x, y in batches:
        ...         optimizer.zero_grad()
        ...         loss(model(x), y).backward()
        ...         optimizer.step()
        """
        return Join(
            [self],
            enable,
            throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
        )

    def join_hook(self, **kwargs: Any) -> DDPJoinHook:
        """Make the hook that shadows this module's collectives; local.

        Parameters
        ----------
        **kwargs
            ``divide_by_initial_world_size`` as for :meth:`join`; others are ignored.

        Returns
        -------
        DDPJoinHook
            A new one.

        Raises
        ------
        ValueError
            With delayed parameters or a buffer hook, whose collectives it does not shadow.
        TypeError
            If a flag is not a boolean.
        """
        if self._delayed is not None or self._buffers_of_module.has_hook:
            raise ValueError(
                "join shadows neither delay_all_reduce_named_params nor buffer hooks; omit "
                "them, or give all ranks equally many inputs"
            )
        name = "divide_by_initial_world_size"
        initial = yes_or_no(kwargs.get(name, True), name)
        self._stats.describe(join_uneven_inputs=True)
        return DDPJoinHook(self, initial)

    @property
    def join_device(self) -> torch.device:
        """The device of the parameters."""
        return next(self.module.parameters()).device

    @property
    def join_process_group(self) -> Any:
        """The group of this module, a ``ProcessGroup``."""
        return self.process_group

    def _join_step(self, averages: bool) -> int:
        """Notify the ranks that are done of this step; return the rank whose buffers are copied."""
        work = Join.notify_join_context(self)
        step = agree(self.process_group, True, averages, self.will_sync_module_buffers())
        if work is not None:
            work.wait()
        self._take_step(step, getattr(self._join_config.hook, "initial", True))
        return step.root

    def _take_step(self, step: Step, initial: bool) -> None:
        reducer = self._the_reducer("join")
        reducer.transfer.divisor = None if initial else step.training
        # A rank that is done learns only from the others which parameters nobody uses.
        reducer.may_skip(False)
