"""Windows of groups of stock torch.distributed."""

# the handles are torch's, which are not hpcdist's
# mypy: disable-error-code="override"

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch.distributed import Work

from hpcdist.groups.windows.options import PutOptions, seconds_of
from hpcdist.groups.windows.window import Window
from hpcdist.torch.work import BridgeWork, limit_of


class BridgeWindow(Window):
    """A :class:`hpcdist.Window` that takes torch's options, and returns torch's handles.

    Parameters
    ----------
    group : hpcdist.ProcessGroup
        The group; this process is a member.

    Notes
    -----
    Source: ``Window`` of torch 2.15, which has neither ``get`` nor ``accumulate``. This is no
    instance of it: torch's class has no constructor in Python.
    """

    def _seconds(self, opts: Any) -> float | None:
        """Return the limit that options give: torch writes "no timeout" as a negative one."""
        timeout = getattr(opts, "timeout", None)
        if isinstance(timeout, timedelta) and not isinstance(opts, PutOptions):
            return seconds_of(PutOptions(limit_of(timeout)))
        return seconds_of(opts)

    def _handle(self, work: Any, tensors: list[torch.Tensor]) -> Work:
        return BridgeWork(work, tensors)
