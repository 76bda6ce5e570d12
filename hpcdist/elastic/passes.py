"""What passes without an average leave in DistributedDataParallel, beside gradients; local."""

from __future__ import annotations

from typing import Any

import torch

from hpcdist.parallel.ddp.module import DistributedDataParallel

#: Entries: which parameters got a gradient, and whether the next forward synchronizes buffers.
_NOTED, _SYNCS = "noted", "syncs"


def take(module: torch.nn.Module) -> dict[str, Any] | None:
    """Return what a commit has of them; None of any other module."""
    if not isinstance(module, DistributedDataParallel) or module.reducer is None:
        return None
    return {_NOTED: module.reducer.noted(), _SYNCS: module.require_forward_param_sync}


def put_back(module: torch.nn.Module, taken: dict[str, Any] | None) -> None:
    """Let the next forward go on from there, also in a group that has been reconfigured."""
    if (
        taken is None
        or not isinstance(module, DistributedDataParallel)
        or module.reducer is None
        or len(taken[_NOTED]) != len(module.reducer.parameters)
    ):
        return
    module.reducer.recall(taken[_NOTED])
    module.go_on_from(taken[_SYNCS])
