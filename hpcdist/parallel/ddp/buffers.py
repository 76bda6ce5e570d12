"""Keeps the buffers of a module (such as running means) the same on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any

import torch

from hpcdist.backends.dispatch import agreeing
from hpcdist.backends.refusal import refusing_parts
from hpcdist.groups.process_group import ProcessGroup
from hpcdist.parallel.reducer.bounded import bounded
from hpcdist.parallel.reducer.copies import unseen
from hpcdist.parallel.sync import packed, send

API = "DistributedDataParallel buffers"


class BufferCommHookLocation(Enum):
    """When a buffer hook runs: before the forward of the module, or after it.

    Source: ``torch.nn.parallel.distributed._BufferCommHookLocation``, which is accepted as well.
    """

    PRE_FORWARD = 1
    POST_FORWARD = 2


class Buffers:
    """The buffers of one module, and their synchronization between ranks.

    Parameters
    ----------
    module : torch.nn.Module
        Whose buffers.
    group : ProcessGroup
        Between whose ranks.
    ignored : collection of str
        Full names of buffers to leave alone.
    """

    def __init__(
        self, module: torch.nn.Module, group: ProcessGroup, ignored: Collection[str]
    ) -> None:
        self._group = group
        self._ignored = frozenset(ignored)
        self._owners = list(module.named_modules())
        self._hook: tuple[Any, Callable[..., Any], str] | None = None

    def __bool__(self) -> bool:
        return any(True for _ in self._current())  # stops at the first: each forward asks

    @property
    def has_hook(self) -> bool:
        """Whether a user's hook synchronizes the buffers."""
        return self._hook is not None

    def named(self) -> dict[str, torch.Tensor]:
        """Return the current buffers by full name.

        Returns
        -------
        dict
            Those that are not None.
        """
        return dict(self._current())

    def _current(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Go through the modules again: forward may have replaced, filled or registered buffers."""
        for prefix, owner in self._owners:
            for name, buffer in owner._buffers.items():
                full = f"{prefix}.{name}" if prefix else name
                if buffer is not None and full not in self._ignored:
                    yield full, buffer

    def set_hook(self, state: Any, hook: Callable[..., Any], location: Any) -> None:
        """Register a user's hook that synchronizes the buffers."""
        self._hook = (state, hook, location.name)

    def sync(self, when: str, root: int = 0) -> list[Any]:
        """Synchronize the buffers if it is due at `when`; all ranks must call it.

        Parameters
        ----------
        when : {"PRE_FORWARD", "POST_FORWARD"}
            The current point of forward.
        root : int
            Group rank whose buffers are copied to the others, if no hook is set.

        Returns
        -------
        list of torch.futures.Future
            To wait for at the end of backward.
        """
        if self._hook is None:
            if when == "PRE_FORWARD":
                self._copy(root)
            return []
        state, hook, location = self._hook
        if when != location:
            return []
        named = self.named()
        with torch.no_grad(), unseen(named.values()):
            what = "DistributedDataParallel's buffer hook"
            futures = [
                bounded(future, self._group.carrier, what) for future in hook(state, named) or ()
            ]
            if when == "POST_FORWARD":
                return futures
            for future in futures:  # forward is about to use them
                future.wait()
        return []

    def _copy(self, root: int) -> None:
        """Copy the buffers of one rank to the others."""
        if self._group.size() == 1:
            return
        comm, buffers = self._group.carrier, self.named().values()
        packs = packed(buffers)
        with (
            refusing_parts(agreeing(comm), API, len(packs), waits=0),
            _in_transforms(),
            unseen(buffers),
        ):
            send(self._group, packs, root, API)


@contextmanager
def _in_transforms() -> Iterator[None]:
    """Say how a module inside a transform of torch.func goes without copies of its buffers."""
    try:
        yield
    except TypeError as error:
        if torch._C._functorch.maybe_current_level() is None:
            raise
        raise TypeError(
            "DistributedDataParallel cannot copy rank 0's buffers inside a transform of torch.func "
            "(grad, vmap, ...), where tensors have no memory of their own; construct it with "
            "forward_sync_buffers=False, and broadcast the buffers outside the transform"
        ) from error
