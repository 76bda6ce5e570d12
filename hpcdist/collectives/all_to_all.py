"""All-to-all: every rank sends a tensor to every rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

from hpcdist._engine import Work
from hpcdist.groups.numbers import split_sizes
from hpcdist.groups.process_group import Group, ProcessGroup
from hpcdist.groups.resolve import carrier_of
from hpcdist.groups.state import world as _world
from hpcdist.typing import Async, Sync, TensorLike, Tensors


@overload
def all_to_all(
    output_tensor_list: Tensors,
    input_tensor_list: Tensors,
    group: Group = ...,
    async_op: Sync = ...,
) -> None: ...


@overload
def all_to_all(
    output_tensor_list: Tensors, input_tensor_list: Tensors, group: Group = ..., *, async_op: Async
) -> Work: ...


@overload
def all_to_all(
    output_tensor_list: Tensors,
    input_tensor_list: Tensors,
    group: Group = ...,
    async_op: bool = ...,
) -> Work | None: ...


def all_to_all(
    output_tensor_list: Tensors,
    input_tensor_list: Tensors,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Send the i-th input to rank i, and receive the i-th output from it.

    All ranks of the group must call it.

    Parameters
    ----------
    output_tensor_list : list of tensor
        Destinations, one per rank of the group, of the sizes those ranks send.
    input_tensor_list : list of tensor
        What this rank sends to each rank, all of one dtype; sizes may differ.
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
        If a list does not fit the group, or a tensor is not dense.
    TypeError
        If a tensor is of a type that cannot be sent.
    DistMismatchError
        On all ranks, if their calls disagree, or a rank sends a size that its peer does not
        expect; no tensor has been changed then.
    DistTimeoutError
        If a rank does not call within the group's timeout.

    Notes
    -----
    Source: ``torch.distributed.all_to_all``.
    """
    comm = _world.comm if group is None else carrier_of(group)
    return comm.all_to_all(output_tensor_list, input_tensor_list, async_op)


@overload
def all_to_all_single(
    output: TensorLike,
    input: TensorLike,
    output_split_sizes: Sequence[int] | None = ...,
    input_split_sizes: Sequence[int] | None = ...,
    group: Group = ...,
    async_op: Sync = ...,
) -> None: ...


@overload
def all_to_all_single(
    output: TensorLike,
    input: TensorLike,
    output_split_sizes: Sequence[int] | None = ...,
    input_split_sizes: Sequence[int] | None = ...,
    group: Group = ...,
    *,
    async_op: Async,
) -> Work: ...


@overload
def all_to_all_single(
    output: TensorLike,
    input: TensorLike,
    output_split_sizes: Sequence[int] | None = ...,
    input_split_sizes: Sequence[int] | None = ...,
    group: Group = ...,
    async_op: bool = ...,
) -> Work | None: ...


def all_to_all_single(
    output: TensorLike,
    input: TensorLike,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Send the i-th part of a tensor to rank i, and receive the i-th part of another from it.

    All ranks of the group must call it.

    Parameters
    ----------
    output : torch.Tensor, numpy.ndarray or buffer
        Destination, split along dimension 0.
    input : torch.Tensor, numpy.ndarray or buffer
        What this rank sends, split along dimension 0.
    output_split_sizes : list of int, or tensor or array of integers, optional
        Rows received from each rank. None or empty: equal parts, and the group's size must divide
        dimension 0.
    input_split_sizes : list of int, optional
        Rows sent to each rank; the same rules apply.
    group, async_op
        As for :func:`all_to_all`.

    Returns
    -------
    Work or None
        A handle if `async_op` is true. None otherwise, and outside the group, with a warning there.

    Raises
    ------
    ValueError
        If the splits do not fit the tensors or the group; see also :func:`all_to_all`.
    TypeError, DistMismatchError, DistTimeoutError
        See :func:`all_to_all`.

    Notes
    -----
    Source: ``torch.distributed.all_to_all_single``.
    """
    comm = _world.comm if group is None else carrier_of(group)
    splits = split_sizes(comm, input, output_split_sizes, input_split_sizes)
    return comm.all_to_all_single(output, input, *splits, async_op)
