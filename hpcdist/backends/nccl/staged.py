"""Host arrays of hpcdist's own small exchanges, which go through tensors on the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .reductions import Reductions

__all__ = ["Staged", "is_host"]


def is_host(array: Any, about: dict[str, Any]) -> bool:
    """Whether this is an exchange of hpcdist's own: on a NumPy array, and with a name."""
    return bool(about) and isinstance(array, np.ndarray)


class Staged(Reductions):
    """The part of a group over NCCL that takes host arrays."""

    # of NcclGroup
    _exchange: Any

    def _upload(self, array: Any) -> Any:
        self._outside_graph("an exchange of the host's own data")
        return self._runtime.upload(np.ascontiguousarray(array), self._runtime.index())

    def _block(self, work: Any) -> None:
        work.brings([])
        work.wait()

    def _staged(
        self,
        call: Any,
        arrays: list[Any],
        written: list[Any],
        *rest: Any,
        async_op: bool = False,
        **about: Any,
    ) -> Any:
        """Run an operation on copies of host arrays; results are copied back when it is waited for.

        Parameters
        ----------
        call : callable
            The operation.
        arrays : list of numpy.ndarray
            Its tensors, in order.
        written : list of numpy.ndarray
            Those among them that it changes.
        *rest
            Its other arguments, up to `async_op`.
        async_op : bool
            Return a handle, whose ``wait()`` stops the caller.
        **about
            Name and number for the entry check.
        """
        copies = {id(each): self._upload(each) for each in arrays}
        work = call(*copies.values(), *rest, True, **about)
        work.brings([(copies[id(each)], each) for each in written])
        if async_op:
            return work
        work.wait()
        return None

    def _staged_gather(self, outputs: list[Any], own: Any) -> None:
        copies = [self._upload(each) for each in outputs]
        self._block(self.all_gather(copies, self._upload(own), True))
        for each, copy in zip(outputs, copies, strict=True):
            self._runtime.download(copy, each)

    def _staged_exchange(
        self, sent: Sequence[Any], to: Any, received: Sequence[Any], sources: Any
    ) -> None:
        ins, outs = [self._upload(each) for each in sent], [self._upload(e) for e in received]
        self._block(self._exchange("all_to_all", ins, to, outs, sources, {}, True))
        for each, copy in zip(received, outs, strict=True):
            self._runtime.download(copy, each)
