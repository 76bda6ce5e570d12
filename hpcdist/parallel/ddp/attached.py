"""Takes over optimizers that torch attached to parameters, to step in the middle of backward.

Their hooks would step before a gradient is averaged, so DDP takes them over, also those that were
attached after it wrapped the module.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["Attached"]

#: The module by which torch attaches them; if it is not imported, none is attached.
_MODULE = "torch.distributed.optim.apply_optimizer_in_backward"


class Attached:
    """Takes over what ``torch.distributed.optim._apply_optimizer_in_backward`` attaches.

    Parameters
    ----------
    parameters : sequence of torch.nn.Parameter
        Those that DDP averages.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._parameters = parameters
        self._known = [0] * len(parameters)
        self._state: Any = None

    def take(self, ddp: Any) -> None:
        """Take over the optimizers attached since the last call; local.

        Parameters
        ----------
        ddp : DistributedDataParallel
            The module, which gets a communication hook that steps.

        Raises
        ------
        RuntimeError
            If it has another communication hook.
        """
        if _MODULE not in sys.modules:
            return
        found = [len(getattr(p, "_in_backward_optimizers", ())) for p in self._parameters]
        if found == self._known:
            return
        from hpcdist.parallel.comm_hooks import optimizer  # imported late: few programs need hooks

        state = optimizer.OptimizerInBackward.attached(self._parameters, ddp.process_group)
        if self._state is not None:
            self._state.optimizers.update(state.optimizers)
        else:
            if ddp.reducer.transfer.has_hook:
                raise RuntimeError(
                    "optimizers were attached to parameters (_apply_optimizer_in_backward) of a "
                    "DistributedDataParallel with a communication hook; give it one of the two"
                )
            ddp.register_comm_hook(state, optimizer.optimizer_in_backward_hook)
            self._state = state
        self._known = found
