"""Reductions over all ranks of a group."""

from __future__ import annotations

from typing import Any, overload

from hpcdist._engine import Work
from hpcdist._ops import ReduceOp
from hpcdist.groups.process_group import Group, ProcessGroup
from hpcdist.groups.resolve import carrier_of, checked_root, resolve
from hpcdist.groups.state import world as _world
from hpcdist.groups.tensors import as_list, reals_or_raise, sparse_or_raise
from hpcdist.typing import Async, Op, Sync, TensorLike, Tensors

_SUM = ReduceOp.SUM


@overload
def all_reduce(
    tensor: TensorLike, op: Op = ..., group: Group = ..., async_op: Sync = ...
) -> None: ...


@overload
def all_reduce(
    tensor: TensorLike, op: Op = ..., group: Group = ..., *, async_op: Async
) -> Work: ...


@overload
def all_reduce(
    tensor: TensorLike, op: Op = ..., group: Group = ..., async_op: bool = ...
) -> Work | None: ...


def all_reduce(
    tensor: TensorLike, op: Op = _SUM, group: ProcessGroup | None = None, async_op: bool = False
) -> Work | None:
    """Reduce a tensor over all ranks, in place on each.

    All ranks of the group must call it.

    Parameters
    ----------
    tensor : torch.Tensor, numpy.ndarray or buffer
        Input and result; the same shape and dtype on all ranks. May be empty. For SUM and AVG
        without `async_op` it may also be a sparse COO tensor, whose entries may differ per rank.
    op : ReduceOp
        SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR or PREMUL_SUM(factor). Complex numbers have
        SUM, AVG and PREMUL_SUM only.
    group : ProcessGroup, optional
        None means the default group.
    async_op : bool
        Return at once; the call's tensors must not be touched until the handle is done.

    Returns
    -------
    Work or None
        A handle if `async_op` is true. None otherwise, and outside the group, with a warning there.

    Raises
    ------
    ValueError, TypeError
        If the tensor is not dense, or of a type or dtype that cannot be reduced this way.
    DistMismatchError
        On all ranks, if their calls disagree; no tensor has been changed then.
    DistTimeoutError
        If a rank does not call within the group's timeout.

    Notes
    -----
    The result is bitwise the same on all ranks, and from run to run. float16 and bfloat16 are
    added in float32 and rounded once per step of the reduction. A NaN wins in MIN and MAX.
    Source: ``torch.distributed.all_reduce``.
    """
    # one attribute and one native call: anything more would be measurable at 8 bytes
    comm = _world.comm if group is None else carrier_of(group)
    try:
        return comm.all_reduce(tensor, op, async_op)
    except TypeError as error:
        return sparse_or_raise(comm, tensor, op, async_op, error)


@overload
def all_reduce_coalesced(
    tensors: Any, op: Op = ..., group: Group = ..., async_op: Sync = ...
) -> None: ...


@overload
def all_reduce_coalesced(
    tensors: Any, op: Op = ..., group: Group = ..., *, async_op: Async
) -> Work: ...


@overload
def all_reduce_coalesced(
    tensors: Any, op: Op = ..., group: Group = ..., async_op: bool = ...
) -> Work | None: ...


def all_reduce_coalesced(
    tensors: Any, op: Op = _SUM, group: ProcessGroup | None = None, async_op: bool = False
) -> Work | None:
    """Reduce several tensors over all ranks in one operation, in place.

    All ranks of the group must call it.

    Parameters
    ----------
    tensors : list of tensor, or tensor
        Inputs and results, of one dtype; the same number and shapes on all ranks. For SUM, AVG and
        PREMUL_SUM, complex tensors may be mixed with real ones of their precision.
    op, group, async_op
        As for :func:`all_reduce`.

    Returns
    -------
    Work or None
        A handle if `async_op` is true. None otherwise, and outside the group, with a warning there.

    Raises
    ------
    ValueError, TypeError
        See :func:`all_reduce`; also if the tensors differ in dtype.
    DistMismatchError, DistTimeoutError
        See :func:`all_reduce`.

    Notes
    -----
    Source: ``torch.distributed.all_reduce_coalesced``, which returns a future; a
    :class:`Work` has ``get_future()``.
    """
    comm = _world.comm if group is None else carrier_of(group)
    listed = as_list(tensors)
    try:
        return comm.all_reduce_coalesced(listed, op, async_op)
    except TypeError as error:
        return reals_or_raise(comm, listed, op, async_op, error)


@overload
def reduce(
    tensor: TensorLike,
    dst: int | None = ...,
    op: Op = ...,
    group: Group = ...,
    async_op: Sync = ...,
    group_dst: int | None = ...,
) -> None: ...


@overload
def reduce(
    tensor: TensorLike,
    dst: int | None = ...,
    op: Op = ...,
    group: Group = ...,
    *,
    async_op: Async,
    group_dst: int | None = ...,
) -> Work: ...


@overload
def reduce(
    tensor: TensorLike,
    dst: int | None = ...,
    op: Op = ...,
    group: Group = ...,
    async_op: bool = ...,
    group_dst: int | None = ...,
) -> Work | None: ...


def reduce(
    tensor: TensorLike,
    dst: int | None = None,
    op: Op = _SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Work | None:
    """Reduce a tensor over all ranks onto one of them.

    All ranks of the group must call it.

    Parameters
    ----------
    tensor : torch.Tensor, numpy.ndarray or buffer
        Input, the same shape and dtype on all ranks; on the destination also the result. On the
        other ranks it is not changed.
    dst : int, optional
        Destination, as a rank of the world.
    op, group, async_op
        As for :func:`all_reduce`.
    group_dst : int, optional
        Destination, as a rank of the group; give one of the two.

    Returns
    -------
    Work or None
        A handle if `async_op` is true. None otherwise, and outside the group, with a warning there.

    Raises
    ------
    ValueError
        If the destination is not in the group, or given twice or not at all; see also
        :func:`all_reduce`.
    DistMismatchError, DistTimeoutError
        See :func:`all_reduce`.

    Notes
    -----
    Source: ``torch.distributed.reduce``.
    """
    pg = resolve(group)
    return pg.carrier.reduce(
        tensor, checked_root(pg, "reduce", tensor, dst, group_dst, "dst"), op, async_op
    )


@overload
def reduce_scatter(
    output: TensorLike, input_list: Tensors, op: Op = ..., group: Group = ..., async_op: Sync = ...
) -> None: ...


@overload
def reduce_scatter(
    output: TensorLike, input_list: Tensors, op: Op = ..., group: Group = ..., *, async_op: Async
) -> Work: ...


@overload
def reduce_scatter(
    output: TensorLike, input_list: Tensors, op: Op = ..., group: Group = ..., async_op: bool = ...
) -> Work | None: ...


def reduce_scatter(
    output: TensorLike,
    input_list: Tensors,
    op: Op = _SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Reduce a list of tensors over all ranks; each rank keeps one.

    All ranks of the group must call it.

    Parameters
    ----------
    output : torch.Tensor, numpy.ndarray or buffer
        Result of this rank: element ``rank`` of the reduced list.
    input_list : list of tensor
        One per rank of the group. They may differ within the list; element i has the same shape on
        all ranks, that of rank i's output.
    op, group, async_op
        As for :func:`all_reduce`.

    Returns
    -------
    Work or None
        A handle if `async_op` is true. None otherwise, and outside the group, with a warning there.

    Raises
    ------
    ValueError
        If the list or its sizes do not fit the group; see also :func:`all_reduce`.
    DistMismatchError, DistTimeoutError
        See :func:`all_reduce`.

    Notes
    -----
    Source: ``torch.distributed.reduce_scatter``.
    """
    comm = _world.comm if group is None else carrier_of(group)
    return comm.reduce_scatter(output, input_list, op, async_op)


@overload
def reduce_scatter_single(
    output: TensorLike, input: TensorLike, op: Op = ..., group: Group = ..., async_op: Sync = ...
) -> None: ...


@overload
def reduce_scatter_single(
    output: TensorLike, input: TensorLike, op: Op = ..., group: Group = ..., *, async_op: Async
) -> Work: ...


@overload
def reduce_scatter_single(
    output: TensorLike, input: TensorLike, op: Op = ..., group: Group = ..., async_op: bool = ...
) -> Work | None: ...


def reduce_scatter_single(
    output: TensorLike,
    input: TensorLike,
    op: Op = _SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Reduce a tensor over all ranks; each rank keeps its part.

    All ranks of the group must call it. ``reduce_scatter_tensor`` is another name for it.

    Parameters
    ----------
    output : torch.Tensor, numpy.ndarray or buffer
        Result of this rank; the same size on all ranks.
    input : torch.Tensor, numpy.ndarray or buffer
        What is reduced: as many elements as the output times the group's size, the part of rank 0
        first.
    op, group, async_op
        As for :func:`all_reduce`.

    Returns
    -------
    Work or None
        A handle if `async_op` is true. None otherwise, and outside the group, with a warning there.

    Raises
    ------
    ValueError
        If the sizes do not fit the group; see also :func:`all_reduce`.
    DistMismatchError, DistTimeoutError
        See :func:`all_reduce`.

    Notes
    -----
    Source: ``torch.distributed.reduce_scatter_single`` (``reduce_scatter_tensor``).
    """
    comm = _world.comm if group is None else carrier_of(group)
    return comm.reduce_scatter_tensor(output, input, op, async_op)


reduce_scatter_tensor = reduce_scatter_single
