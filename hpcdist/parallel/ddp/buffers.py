"""Keeps the buffers of a module (running means and the like) alike on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection
from enum import Enum
from typing import Any

import torch

from hpcdist.parallel.reducer.bounded import bounded
from hpcdist.parallel.sync import broadcast_tensors

__all__ = ["BufferCommHookLocation", "Buffers"]

API = "DistributedDataParallel buffers"


class BufferCommHookLocation(Enum):
    """When a buffer hook runs: before the forward of the module, or after it.

    Source: ``torch.nn.parallel.distributed._BufferCommHookLocation``, which is accepted as well.
    """

    PRE_FORWARD = 1
    POST_FORWARD = 2


class Buffers:
    """The buffers of one module, and how ranks come to hold the same ones.

    Parameters
    ----------
    module : torch.nn.Module
        Whose buffers.
    group : ProcessGroup
        Between whose ranks.
    ignored : collection of str
        Full names of buffers to leave alone.
    """

    def __init__(self, module: torch.nn.Module, group: Any, ignored: Collection[str]) -> None:
        self._group = group
        # Where they are kept, not the tensors: a module may put another one in the place.
        self._places = [
            (f"{prefix}.{name}" if prefix else name, owner, name)
            for prefix, owner in module.named_modules()
            for name, buffer in owner._buffers.items()
            if buffer is not None
        ]
        self._places = [place for place in self._places if place[0] not in ignored]
        self._hook: tuple[Any, Callable[..., Any], str] | None = None

    def __bool__(self) -> bool:
        return bool(self._places)

    @property
    def has_hook(self) -> bool:
        """Whether a function of the user's takes care of them."""
        return self._hook is not None

    def named(self) -> dict[str, torch.Tensor]:
        """The buffers as they are now, by full name.

        Returns
        -------
        dict
            Those that are not None.
        """
        found = {full: owner._buffers.get(name) for full, owner, name in self._places}
        return {full: buffer for full, buffer in found.items() if buffer is not None}

    def set_hook(self, state: Any, hook: Callable[..., Any], location: Any) -> None:
        """Let a function of the user's do what is to be done."""
        self._hook = (state, hook, location.name)

    def sync(self, when: str, root: int = 0) -> list[Any]:
        """Make them alike, if this is the time for it; all ranks must call it.

        Parameters
        ----------
        when : {"PRE_FORWARD", "POST_FORWARD"}
            Where in forward this is.
        root : int
            Group rank whose buffers go to the others, where no hook is set.

        Returns
        -------
        list of torch.futures.Future
            To be waited for at the end of backward.
        """
        if self._hook is None:
            if when == "PRE_FORWARD":
                broadcast_tensors(self._group, self.named().values(), root, api=API)
            return []
        state, hook, location = self._hook
        if when != location:
            return []
        with torch.no_grad():
            what = "DistributedDataParallel's buffer hook"
            futures = [
                bounded(future, self._group._comm, what)
                for future in hook(state, self.named()) or ()
            ]
        if when == "POST_FORWARD":
            return futures
        for future in futures:  # forward is about to use them
            future.wait()
        return []
