"""Host arrays of hpcdist's own small exchanges, which go through tensors on the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hpcdist._nccl import StreamQueue
from hpcdist.errors import DistBackendError, checked_async

from . import movements


def is_own(array: Any, about: dict[str, Any]) -> bool:
    """Whether this is an exchange of hpcdist's own: on a NumPy array, and with a name."""
    return bool(about) and isinstance(array, np.ndarray)


def refuse_capture(queue: StreamQueue, api: str) -> None:
    """Refuse what needs the host while a CUDA graph, which cannot contain it, is captured."""
    if queue.runtime.capturing():
        raise DistBackendError(
            f"{api} of the group {queue.name!r} cannot be captured into a CUDA graph, because "
            "the host takes part in it: call it outside of the capture"
        )


def upload(queue: StreamQueue, array: Any, device: int | None = None) -> Any:
    """Return a copy of an array on a device; None: the group's, else the current one."""
    refuse_capture(queue, "an exchange of the host's own data")
    index = queue.index() if device is None else device
    return queue.runtime.upload(np.ascontiguousarray(array), index)


def wait_on_host(work: Any) -> None:
    """Block the caller until an operation is done."""
    work.brings([])
    work.wait()


def run_on_copies(
    queue: StreamQueue,
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
    queue : StreamQueue
        Of the group.
    call : callable
        The operation.
    arrays : list of numpy.ndarray
        Its tensors, in order.
    written : list of numpy.ndarray
        Those among them that it changes: the first ones.
    *rest
        Its other arguments, up to `async_op`.
    async_op : bool
        Return a handle, whose ``wait()`` stops the caller.
    **about
        Name and number for the entry check.
    """
    async_op = checked_async(async_op)
    copies = [upload(queue, each) for each in arrays]
    work = call(*copies, *rest, True, **about)
    work.brings(list(zip(copies, written, strict=False)))
    if async_op:
        return work
    work.wait()
    return None


def gather_all(queue: StreamQueue, outputs: list[Any], own: Any) -> None:
    """Collect an array of each rank on all ranks."""
    copies = [upload(queue, each) for each in outputs]
    inputs = [upload(queue, own)]
    wait_on_host(movements.gather_all(queue, "all_gather", [copies], inputs, True))
    for each, copy in zip(outputs, copies, strict=True):
        queue.runtime.download(copy, each)


def exchange(
    queue: StreamQueue, sent: Sequence[Any], to: Any, received: Sequence[Any], sources: Any
) -> None:
    """Send arrays and receive others, all of them together."""
    ins, outs = [upload(queue, each) for each in sent], [upload(queue, e) for e in received]
    wait_on_host(movements.exchange(queue, "all_to_all", ins, to, outs, sources, {}, True))
    for each, copy in zip(received, outs, strict=True):
        queue.runtime.download(copy, each)
