"""Takes over optimizers that torch attached to parameters, to step in the middle of backward.

Their hooks would step before a gradient is averaged, so DDP takes them over, also those that were
attached after it wrapped the module.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch

from hpcdist.groups.process_group import ProcessGroup
from hpcdist.parallel.reducer.reducer import Reducer
from hpcdist.parallel.reducer.stats import Stats

#: The module by which torch attaches them; if it is not imported, none is attached.
_MODULE = "torch.distributed.optim.apply_optimizer_in_backward"


class Attached:
    """Takes over what ``torch.distributed.optim._apply_optimizer_in_backward`` attaches.

    Parameters
    ----------
    parameters : sequence of torch.nn.Parameter
        Those that the reducer averages.
    delayed : sequence of (str, torch.nn.Parameter)
        Those that are averaged together, too late for a step in the middle of backward.
    reducer : Reducer or None
        Gets a communication hook that steps. None if all parameters are delayed.
    group : ProcessGroup
        Between whose ranks.
    stats : Stats
        Where the hook's name is recorded.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        delayed: Sequence[tuple[str, torch.nn.Parameter]],
        reducer: Reducer | None,
        group: ProcessGroup,
        stats: Stats,
    ) -> None:
        self._parameters = parameters
        self._delayed = delayed
        self._reducer = reducer
        self._group = group
        self._stats = stats
        self._known = [0] * len(parameters)
        self._state: Any = None

    def take(self) -> None:
        """Take over the optimizers attached since the last call; local.

        Raises
        ------
        RuntimeError
            If the module has another communication hook, or an optimizer of a delayed parameter
            was attached.
        """
        if _MODULE not in sys.modules:
            return
        for name, parameter in self._delayed:
            if getattr(parameter, "_in_backward_optimizers", ()):
                raise RuntimeError(
                    f"an optimizer was attached (_apply_optimizer_in_backward) to {name}, which is "
                    "one of delay_all_reduce_named_params; it would step before the gradient is "
                    "averaged: step these parameters after backward"
                )
        found = [len(getattr(p, "_in_backward_optimizers", ())) for p in self._parameters]
        if found == self._known:
            return
        from hpcdist.parallel.comm_hooks import optimizer  # imported late: few programs need hooks

        assert self._reducer is not None
        if self._state is None and self._reducer.transfer.has_hook:
            raise RuntimeError(
                "optimizers were attached to parameters (_apply_optimizer_in_backward) of a "
                "DistributedDataParallel with a communication hook; give it one of the two"
            )
        state = optimizer.OptimizerInBackward.attached(self._parameters, self._group)
        if self._state is not None:
            self._state.optimizers.update(state.optimizers)
        else:
            hook = optimizer.optimizer_in_backward_hook
            self._reducer.set_hook(state, hook)
            self._stats.describe(comm_hook=hook.__qualname__)
            self._state = state
        self._known = found
