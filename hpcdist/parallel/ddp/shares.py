"""Backward passes of several shares of a batch on one rank, whose gradients are averaged together.

While each rank has one share, DistributedDataParallel averages as always. When ranks have died,
others compute their shares: each share's gradients then stay apart until all are there, and are
averaged in the order of the shares.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from hpcdist._graph import overlapping
from hpcdist._ops import ReduceOp
from hpcdist.groups.world import world
from hpcdist.parallel import ordered
from hpcdist.parallel.ddp.arguments import sparse_indices

if TYPE_CHECKING:
    from hpcdist.parallel.ddp.module import DistributedDataParallel

_Gradients = list[torch.Tensor | None]


def refusal(model: DistributedDataParallel) -> str:
    """Return why a model cannot average the gradients of shares; empty if it can. Local."""
    layers = [type(layer).__name__ for layer in model.modules()]
    reducer = model.reducer
    for why, holds in {
        "is over another group than the default one": model.process_group is not world.pg,
        "has a communication hook": reducer is not None and reducer.transfer.has_hook,
        "has a buffer hook": model._buffers_of_module.has_hook,
        "has parameters with sparse gradients": bool(
            sparse_indices(model.module, list(model.module.parameters()))
        ),
        "has SyncBatchNorm, whose forward needs all ranks": "SyncBatchNorm" in layers,
        "has mixed_precision": model.mixed_precision is not None,
        "has delay_all_reduce_named_params": model._delayed is not None,
        "ends backward by hand": reducer is not None and reducer.manual,
    }.items():
        if holds:
            return f"a DistributedDataParallel {why}"
    return ""


class Apart:
    """Keeps the gradients of each share of one model apart, during one step.

    Parameters
    ----------
    model : DistributedDataParallel
        Over the default group.
    dealt : sequence of sequence of int
        By rank, its shares.
    others : sequence of Apart
        Of models whose parameters are left to them.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        dealt: Sequence[Sequence[int]],
        others: Sequence[Apart] = (),
    ) -> None:
        self._model = model
        self._dealt = dealt
        left = {id(p) for each in others for p in each._parameters}
        named = model._synced(False)
        self._parameters: list[torch.Tensor] = [
            p for _, p in named if p.requires_grad and id(p) not in left
        ]
        self._before: _Gradients = [p.grad for p in self._parameters]
        self._given: _Gradients = []
        self._versions: list[int] = []
        self._buffers: dict[str, torch.Tensor] = {}
        self._rows: list[_Gradients] = []
        self._used = np.zeros(len(self._parameters), np.uint8)

    def begin(self) -> None:
        """Do what a forward that averages does with the other ranks; all ranks must call it.

        Raises
        ------
        RuntimeError
            Under :meth:`DistributedDataParallel.no_sync`, or in a join context.
        ValueError
            Where :func:`refusal` has a reason.
        """
        model = self._model
        if not model.require_backward_grad_sync or model._join_config.enable:
            raise RuntimeError(
                "the shares of a step are inside no_sync() or join(): accumulate gradients inside "
                "the loop over the shares"
            )
        why = refusal(model)
        if why:
            raise ValueError(f"{why}, so its gradients cannot be averaged by shares")
        model._check_last_backward()
        if model.reducer is not None:
            model.reducer.rebuild()
        if model.will_sync_module_buffers():
            root = next(rank for rank, shares in enumerate(self._dealt) if 0 in shares)
            model._buffers_of_module.sync("PRE_FORWARD", root)
            named = model._buffers_of_module.named()
            self._buffers = {name: buffer.clone() for name, buffer in named.items()}
        model.require_forward_param_sync = model.require_backward_grad_sync = False

    @torch.no_grad()
    def start(self) -> None:
        """Begin a share, with the gradients and the buffers that it has on a rank of its own."""
        for name, buffer in self._model._buffers_of_module.named().items():
            if name in self._buffers:
                buffer.copy_(self._buffers[name])
        self._given = [None if g is None else g.detach().clone() for g in self._before]
        self._versions = [0 if g is None else g._version for g in self._given]
        for parameter, gradient in zip(self._parameters, self._given, strict=True):
            parameter.grad = gradient

    def stop(self) -> None:
        """Put the gradients of this share aside.

        Parameters that take part through views of the same shape are given views of one gradient,
        into which several averages would be written.
        """
        for place in overlapping([parameter.grad for parameter in self._parameters]):
            shared = self._parameters[place].grad
            self._parameters[place].grad = None if shared is None else shared.clone()
        row: _Gradients = []
        for index, parameter in enumerate(self._parameters):
            gradient = parameter.grad
            row.append(None if gradient is None else gradient.detach())
            given = self._given[index]
            if gradient is not None and (
                gradient is not given or gradient._version != self._versions[index]
            ):
                self._used[index] = 1
            parameter.grad = None
        self._given = []
        self._rows.append(row)

    def average(self) -> None:
        """Average the gradients of all shares, into ``parameter.grad``; all ranks must call it.

        A parameter that no share has used keeps the gradient that it had.
        """
        comm = self._model.process_group.carrier
        if comm.size > 1:
            comm.all_reduce(self._used, ReduceOp.MAX, api=ordered.API)
        used = np.flatnonzero(self._used).tolist()
        results = [self._place(index) for index in used]
        rows = [[row[index] for index in used] for row in self._rows]
        ordered.average(comm, self._dealt, rows, results)
        for index, parameter in enumerate(self._parameters):
            parameter.grad = self._before[index]
        for index, result in zip(used, results, strict=True):
            parameter = self._parameters[index]
            if not parameter.is_contiguous():  # gradients have its strides
                result = torch.empty_like(parameter).copy_(result)
            parameter.grad = result.detach()
        self._rows = []

    def _place(self, index: int) -> torch.Tensor:
        """Return where the average of a parameter's gradients goes: into one of them, or anew."""
        for row in self._rows:
            gradient = row[index]
            if gradient is not None and gradient.is_contiguous():
                return gradient
        parameter = self._parameters[index]
        return torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)

    def end(self) -> None:
        """Let the model average as always again; local. Also after an error."""
        self._model.require_forward_param_sync = self._model.require_backward_grad_sync = True
