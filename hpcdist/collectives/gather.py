"""Gather and all-gather: tensors of all ranks, collected on one rank or on all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import overload

from hpcdist._engine import Work
from hpcdist.groups.process_group import Group, ProcessGroup
from hpcdist.groups.resolve import carrier_of, checked_root, resolve
from hpcdist.groups.rooted import has_list, parts_of_root
from hpcdist.groups.state import world as _world
from hpcdist.groups.world import NonMember, warn_outside
from hpcdist.typing import Async, Sync, TensorLike, Tensors


@overload
def all_gather(
    tensor_list: Tensors, tensor: TensorLike, group: Group = ..., async_op: Sync = ...
) -> None: ...


@overload
def all_gather(
    tensor_list: Tensors, tensor: TensorLike, group: Group = ..., *, async_op: Async
) -> Work: ...


@overload
def all_gather(
    tensor_list: Tensors, tensor: TensorLike, group: Group = ..., async_op: bool = ...
) -> Work | None: ...


def all_gather(
    tensor_list: Tensors,
    tensor: TensorLike,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Collect a tensor of each rank in a list, on all ranks.

    All ranks of the group must call it.

    Parameters
    ----------
    tensor_list : list of tensor
        Destinations, one per rank of the group. They may differ within the list: element i has the
        shape of rank i's tensor, on all ranks.
    tensor : torch.Tensor, numpy.ndarray or buffer
        What this rank sends.
    group : ProcessGroup, optional
        None means the default group.
    async_op : bool
        Return at once; the tensors must not be touched until the handle is done.

    Returns
    -------
    Work or None
        A handle if `async_op` is true. None otherwise, and outside the group, with a warning there.

    Raises
    ------
    ValueError
        If the list does not fit the group, or a tensor is not dense.
    TypeError
        If a tensor is of a type that cannot be sent.
    DistMismatchError
        On all ranks, if their calls disagree; no tensor has been changed then.
    DistTimeoutError
        If a rank does not call within the group's timeout.

    Notes
    -----
    Source: ``torch.distributed.all_gather``.
    """
    comm = _world.comm if group is None else carrier_of(group)
    return comm.all_gather(tensor_list, tensor, async_op)


@overload
def all_gather_single(
    output_tensor: TensorLike, input_tensor: TensorLike, group: Group = ..., async_op: Sync = ...
) -> None: ...


@overload
def all_gather_single(
    output_tensor: TensorLike, input_tensor: TensorLike, group: Group = ..., *, async_op: Async
) -> Work: ...


@overload
def all_gather_single(
    output_tensor: TensorLike, input_tensor: TensorLike, group: Group = ..., async_op: bool = ...
) -> Work | None: ...


def all_gather_single(
    output_tensor: TensorLike,
    input_tensor: TensorLike,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Collect equal tensors of all ranks in one tensor, on all ranks.

    All ranks of the group must call it. ``all_gather_into_tensor`` is another name for it.

    Parameters
    ----------
    output_tensor : torch.Tensor, numpy.ndarray or buffer
        Destination: as many elements as the input times the group's size, rank 0's first. Its shape
        may be the concatenation or the stack of the inputs.
    input_tensor : torch.Tensor, numpy.ndarray or buffer
        What this rank sends, the same size on all ranks.
    group, async_op
        As for :func:`all_gather`.

    Returns
    -------
    Work or None
        A handle if `async_op` is true. None otherwise, and outside the group, with a warning there.

    Raises
    ------
    ValueError, TypeError, DistMismatchError, DistTimeoutError
        See :func:`all_gather`.

    Notes
    -----
    Source: ``torch.distributed.all_gather_single`` (``all_gather_into_tensor``).
    """
    comm = _world.comm if group is None else carrier_of(group)
    return comm.all_gather_into_tensor(output_tensor, input_tensor, async_op)


all_gather_into_tensor = all_gather_single


@overload
def all_gather_coalesced(
    output_tensor_lists: Iterable[Tensors],
    input_tensor_list: Tensors,
    group: Group = ...,
    async_op: Sync = ...,
) -> None: ...


@overload
def all_gather_coalesced(
    output_tensor_lists: Iterable[Tensors],
    input_tensor_list: Tensors,
    group: Group = ...,
    *,
    async_op: Async,
) -> Work: ...


@overload
def all_gather_coalesced(
    output_tensor_lists: Iterable[Tensors],
    input_tensor_list: Tensors,
    group: Group = ...,
    async_op: bool = ...,
) -> Work | None: ...


def all_gather_coalesced(
    output_tensor_lists: Iterable[Tensors],
    input_tensor_list: Tensors,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Collect several tensors of each rank on all ranks in one operation.

    All ranks of the group must call it.

    Parameters
    ----------
    output_tensor_lists : list of list of tensor
        Destinations: one list per rank of the group, with the shapes that this rank sends.
    input_tensor_list : list of tensor
        What this rank sends; the same number and shapes on all ranks.
    group, async_op
        As for :func:`all_gather`.

    Returns
    -------
    Work or None
        A handle if `async_op` is true. None otherwise, and outside the group, with a warning there.

    Raises
    ------
    ValueError, TypeError, DistMismatchError, DistTimeoutError
        See :func:`all_gather`.

    Notes
    -----
    Source: ``torch.distributed.all_gather_coalesced``.
    """
    comm = _world.comm if group is None else carrier_of(group)
    return comm.all_gather_coalesced(output_tensor_lists, input_tensor_list, async_op)


@overload
def gather(
    tensor: TensorLike,
    gather_list: Tensors | None = ...,
    dst: int | None = ...,
    group: Group = ...,
    async_op: Sync = ...,
    group_dst: int | None = ...,
) -> None: ...


@overload
def gather(
    tensor: TensorLike,
    gather_list: Tensors | None = ...,
    dst: int | None = ...,
    group: Group = ...,
    *,
    async_op: Async,
    group_dst: int | None = ...,
) -> Work: ...


@overload
def gather(
    tensor: TensorLike,
    gather_list: Tensors | None = ...,
    dst: int | None = ...,
    group: Group = ...,
    async_op: bool = ...,
    group_dst: int | None = ...,
) -> Work | None: ...


def gather(
    tensor: TensorLike,
    gather_list: Tensors | None = None,
    dst: int | None = None,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Work | None:
    """Collect a tensor of each rank in a list, on one rank.

    All ranks of the group must call it.

    Parameters
    ----------
    tensor : torch.Tensor, numpy.ndarray or buffer
        What this rank sends.
    gather_list : list of tensor, optional
        On the destination: one per rank of the group, element i of the size of rank i's tensor.
        None elsewhere.
    dst : int, optional
        Destination, as a rank of the world. Without `dst` and `group_dst`, rank 0 of the world.
    group : ProcessGroup, optional
        None means the default group.
    async_op : bool
        Return at once; the tensors must not be touched until the handle is done.
    group_dst : int, optional
        Destination, as a rank of the group; give at most one of the two.

    Returns
    -------
    Work or None
        A handle if `async_op` is true. None otherwise, and outside the group, with a warning there.

    Raises
    ------
    ValueError
        If the list is missing on the destination, or given elsewhere; if the destination is not in
        the group; see also :func:`all_gather`.
    TypeError, DistMismatchError, DistTimeoutError
        See :func:`all_gather`.

    Notes
    -----
    Source: ``torch.distributed.gather``.
    """
    pg = resolve(group)
    if dst is None and group_dst is None:
        dst = 0
    root = checked_root(pg, "gather", tensor, dst, group_dst, "dst")
    comm, name = pg.carrier, pg.members.name
    here = has_list(comm, name, "gather", tensor, gather_list, root, "destination")
    return comm.gather(tensor, gather_list if here else None, root, async_op)


@overload
def gather_single(
    tensor: TensorLike,
    gather_tensor: TensorLike | None = ...,
    dst: int | None = ...,
    group: Group = ...,
    async_op: Sync = ...,
    group_dst: int | None = ...,
) -> None: ...


@overload
def gather_single(
    tensor: TensorLike,
    gather_tensor: TensorLike | None = ...,
    dst: int | None = ...,
    group: Group = ...,
    *,
    async_op: Async,
    group_dst: int | None = ...,
) -> Work: ...


@overload
def gather_single(
    tensor: TensorLike,
    gather_tensor: TensorLike | None = ...,
    dst: int | None = ...,
    group: Group = ...,
    async_op: bool = ...,
    group_dst: int | None = ...,
) -> Work | None: ...


def gather_single(
    tensor: TensorLike,
    gather_tensor: TensorLike | None = None,
    dst: int | None = None,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Work | None:
    """Collect equal tensors of all ranks in one tensor, on one rank.

    All ranks of the group must call it. ``gather_into_tensor`` is another name for it.

    Parameters
    ----------
    tensor : torch.Tensor or numpy.ndarray
        What this rank sends, the same size on all ranks.
    gather_tensor : torch.Tensor or numpy.ndarray, optional
        On the destination: contiguous, as many elements as `tensor` times the group's size, rank
        0's first. Its shape may be the concatenation or the stack. None elsewhere.
    dst, group, async_op, group_dst
        As for :func:`gather`.

    Returns
    -------
    Work or None
        A handle if `async_op` is true. None otherwise, and outside the group, with a warning there.

    Raises
    ------
    ValueError
        If `gather_tensor` is missing on the destination, is given elsewhere, is not contiguous or
        of the wrong size; if the destination is not in the group.
    TypeError, DistMismatchError, DistTimeoutError
        See :func:`all_gather`.

    Notes
    -----
    Source: ``torch.distributed.gather_single`` (``gather_into_tensor``) of torch 2.14.
    """
    pg = resolve(group)
    if dst is None and group_dst is None:
        dst = 0
    root = checked_root(pg, "gather_single", tensor, dst, group_dst, "dst")
    if isinstance(pg, NonMember):
        warn_outside("gather_single", 3)
        return None
    parts = parts_of_root(pg.carrier, pg.members.name, tensor, gather_tensor, root)
    return pg.carrier.gather(tensor, parts, root, async_op, api="gather_single")


gather_into_tensor = gather_single
