"""A group over MPI, for CUDA tensors."""

from __future__ import annotations

from typing import Any

from .blocks import Blocks
from .messages import Messages
from .reductions import InPlace

__all__ = ["StagedGroup"]


class StagedGroup(InPlace, Blocks, Messages):
    """All operations of a group over MPI on CUDA tensors; ranks are group ranks."""

    def barrier(self, async_op: bool = False, **about: Any) -> Any:
        """Wait until all ranks are here, as for host tensors."""
        return self._comm.barrier(async_op, **about)
