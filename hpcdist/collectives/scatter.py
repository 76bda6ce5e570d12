"""Scatter: each rank receives one tensor of one rank's list."""

from __future__ import annotations

from typing import overload

from hpcdist._engine import Work
from hpcdist.groups.process_group import Group, ProcessGroup
from hpcdist.groups.resolve import checked_root, resolve
from hpcdist.groups.rooted import has_list
from hpcdist.typing import Async, Sync, TensorLike, Tensors


@overload
def scatter(
    tensor: TensorLike,
    scatter_list: Tensors | None = ...,
    src: int | None = ...,
    group: Group = ...,
    async_op: Sync = ...,
    group_src: int | None = ...,
) -> None: ...


@overload
def scatter(
    tensor: TensorLike,
    scatter_list: Tensors | None = ...,
    src: int | None = ...,
    group: Group = ...,
    *,
    async_op: Async,
    group_src: int | None = ...,
) -> Work: ...


@overload
def scatter(
    tensor: TensorLike,
    scatter_list: Tensors | None = ...,
    src: int | None = ...,
    group: Group = ...,
    async_op: bool = ...,
    group_src: int | None = ...,
) -> Work | None: ...


def scatter(
    tensor: TensorLike,
    scatter_list: Tensors | None = None,
    src: int | None = None,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Work | None:
    """Send each rank its tensor of the source's list.

    All ranks of the group must call it.

    Parameters
    ----------
    tensor : torch.Tensor, numpy.ndarray or buffer
        Destination.
    scatter_list : list of tensor, optional
        On the source: one per rank of the group, element i of the size of rank i's tensor. None
        elsewhere.
    src : int, optional
        Source, as a rank of the world. Without `src` and `group_src`, rank 0 of the world.
    group : ProcessGroup, optional
        None means the default group.
    async_op : bool
        Return at once; the tensors must not be touched until the handle is done.
    group_src : int, optional
        Source, as a rank of the group; give at most one of the two.

    Returns
    -------
    Work or None
        A handle if `async_op` is true. None otherwise, and outside the group, with a warning there.

    Raises
    ------
    ValueError
        If the list is missing on the source, or given elsewhere; if the source is not in the group;
        if a tensor is not dense.
    TypeError, DistMismatchError, DistTimeoutError
        See :func:`all_gather`.

    Notes
    -----
    Source: ``torch.distributed.scatter``.
    """
    pg = resolve(group)
    if src is None and group_src is None:
        src = 0
    root = checked_root(pg, "scatter", tensor, src, group_src, "src")
    comm, name = pg.carrier, pg.members.name
    here = has_list(comm, name, "scatter", tensor, scatter_list, root, "source")
    return comm.scatter(tensor, scatter_list if here else None, root, async_op)
