"""A group over MPI, for CUDA tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from hpcdist.backends.refusal import refusing

from .blocks import Blocks
from .messages import Messages
from .reductions import InPlace


class StagedGroup(InPlace, Blocks, Messages):
    """All operations of a group over MPI on CUDA tensors; ranks are group ranks."""

    def barrier(self, async_op: bool = False, **about: Any) -> Any:
        """Wait until all ranks have called, as for host tensors."""
        return self._comm.barrier(async_op, **about)


def _reporting(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """Send the other ranks what a method refuses before the ranks have agreed."""

    @functools.wraps(method)
    def call(self: StagedGroup, *args: Any, **about: Any) -> Any:
        with refusing(self.agreed_on, about.get("api") or name):
            return method(self, *args, **about)

    return call


for _part in (InPlace, Blocks):
    for _name, _method in list(vars(_part).items()):
        if not _name.startswith("_"):
            setattr(StagedGroup, _name, _reporting(_name, _method))
