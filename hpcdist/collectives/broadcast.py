"""Broadcast: one rank's tensor, copied to all ranks."""

from __future__ import annotations

from typing import overload

from hpcdist._engine import Work
from hpcdist.groups.process_group import Group, ProcessGroup
from hpcdist.groups.resolve import checked_root, resolve
from hpcdist.typing import Async, Sync, TensorLike


@overload
def broadcast(
    tensor: TensorLike,
    src: int | None = ...,
    group: Group = ...,
    async_op: Sync = ...,
    group_src: int | None = ...,
) -> None: ...


@overload
def broadcast(
    tensor: TensorLike,
    src: int | None = ...,
    group: Group = ...,
    *,
    async_op: Async,
    group_src: int | None = ...,
) -> Work: ...


@overload
def broadcast(
    tensor: TensorLike,
    src: int | None = ...,
    group: Group = ...,
    async_op: bool = ...,
    group_src: int | None = ...,
) -> Work | None: ...


def broadcast(
    tensor: TensorLike,
    src: int | None = None,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Work | None:
    """Copy the tensor of one rank to all.

    All ranks of the group must call it.

    Parameters
    ----------
    tensor : torch.Tensor, numpy.ndarray or buffer
        Data on the source, destination elsewhere; the same shape and dtype on all ranks. May be
        empty.
    src : int, optional
        Source, as a rank of the world.
    group : ProcessGroup, optional
        None means the default group.
    async_op : bool
        Return at once; `tensor` must not be touched until the handle is done.
    group_src : int, optional
        Source, as a rank of the group; give one of the two.

    Returns
    -------
    Work or None
        A handle if `async_op` is true. None otherwise, and outside the group, with a warning there.

    Raises
    ------
    ValueError
        If the source is not in the group, or given twice or not at all, or the tensor is not dense.
    TypeError, DistMismatchError, DistTimeoutError
        See :func:`all_gather`.

    Notes
    -----
    Source: ``torch.distributed.broadcast``.
    """
    pg = resolve(group)
    root = checked_root(pg, "broadcast", tensor, src, group_src, "src")
    return pg.carrier.broadcast(tensor, root, async_op)
