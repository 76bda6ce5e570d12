"""What moves tensors without combining them, with derivatives."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hpcdist.groups.numbers import split_sizes
from hpcdist.groups.resolve import member
from hpcdist.groups.state import ProcessGroup
from hpcdist.nn import _nodes as nodes


@nodes.collective
def gather(
    tensor: torch.Tensor, dst: int = 0, group: ProcessGroup | None = None
) -> tuple[torch.Tensor, ...]:
    """Collect all ranks' tensors on one rank.

    All ranks of the group must call it, and all or none must run backward through it.

    Parameters
    ----------
    tensor : torch.Tensor
        The same shape and dtype on all ranks.
    dst : int
        Which rank of the world gets them.
    group : ProcessGroup, optional
        None means the default group.

    Returns
    -------
    tuple of torch.Tensor
        One per rank of the group, on `dst`. Elsewhere as many zeros, without gradient.

    Raises
    ------
    ValueError, TypeError, DistMismatchError, DistTimeoutError
        See :func:`hpcdist.gather`, which it calls; backward may raise the same errors.

    Notes
    -----
    Source: ``torch.distributed.nn.functional.gather``.
    """
    pg = member(group)
    return tuple(nodes.Gather.apply(tensor, pg.members.place(dst, None, "dst"), pg))


@nodes.collective
def scatter(
    tensors: Sequence[torch.Tensor], src: int = 0, group: ProcessGroup | None = None
) -> torch.Tensor:
    """Give each rank one tensor of a list of one rank's.

    All ranks of the group must call it, and all or none must run backward through it.

    Parameters
    ----------
    tensors : sequence of torch.Tensor
        One per rank of the group, all of one shape. Also on the ranks that receive, where only
        shape and dtype matter.
    src : int
        The source, as a rank of the world.
    group : ProcessGroup, optional
        None means the default group.

    Returns
    -------
    torch.Tensor
        Element ``rank`` of the source's list. Its gradient goes back there; the gradients of the
        other ranks' lists are zero.

    Raises
    ------
    ValueError, TypeError, DistMismatchError, DistTimeoutError
        See :func:`hpcdist.scatter`, which it calls; backward may raise the same errors.

    Notes
    -----
    Source: ``torch.distributed.nn.functional.scatter``.
    """
    pg = member(group)
    tensors = nodes.one_per_rank(pg, tensors, "tensors")
    if any(tensor.shape != tensors[0].shape for tensor in tensors):
        shapes = [tuple(tensor.shape) for tensor in tensors]
        raise ValueError(f"tensors must have one shape, not {shapes}")
    return nodes.Scatter.apply(pg.members.place(src, None, "src"), pg, *tensors)


@nodes.collective
def all_gather(tensor: torch.Tensor, group: ProcessGroup | None = None) -> tuple[torch.Tensor, ...]:
    """Collect all ranks' tensors on all ranks.

    All ranks of the group must call it, and all or none must run backward through it.

    Parameters
    ----------
    tensor : torch.Tensor
        The same shape and dtype on all ranks.
    group : ProcessGroup, optional
        None means the default group.

    Returns
    -------
    tuple of torch.Tensor
        One per rank of the group. Their gradients are summed on the ranks that gave them.

    Raises
    ------
    ValueError, TypeError, DistMismatchError, DistTimeoutError
        See :func:`hpcdist.all_gather`, which it calls; backward may raise the same errors.

    Notes
    -----
    Source: ``torch.distributed.nn.functional.all_gather``.
    """
    pg = member(group)
    return tuple(nodes.AllGather.apply(tensor, None, [tensor.shape] * pg.size(), pg))


@nodes.collective
def all_gather_single(
    output: torch.Tensor, input: torch.Tensor, group: ProcessGroup | None = None
) -> torch.Tensor:
    """Collect all ranks' tensors in one tensor, on all ranks.

    All ranks of the group must call it, and all or none must run backward through it.

    Parameters
    ----------
    output : torch.Tensor
        Memory for the result: the concatenation or the stack of the inputs.
    input : torch.Tensor
        The same shape and dtype on all ranks.
    group : ProcessGroup, optional
        None means the default group.

    Returns
    -------
    torch.Tensor
        In the memory of `output`, and with a gradient, which `output` itself has not.

    Raises
    ------
    ValueError, TypeError, DistMismatchError, DistTimeoutError
        See :func:`hpcdist.all_gather_single`, which it calls; backward may raise the same errors.

    Notes
    -----
    Source: ``torch.distributed.nn.functional``. There
    it is called ``_all_gather_base``, with no backward but for NCCL.
    """
    return nodes.AllGather.apply(input, [output], None, member(group))


@nodes.collective
def all_to_all(
    output_tensor_list: Sequence[torch.Tensor],
    input_tensor_list: Sequence[torch.Tensor],
    group: ProcessGroup | None = None,
) -> tuple[torch.Tensor, ...]:
    """Send the i-th tensor to rank i, and receive one from each rank.

    All ranks of the group must call it, and all or none must run backward through it.

    Parameters
    ----------
    output_tensor_list : sequence of torch.Tensor
        Memory for the results, of the shapes that the other ranks send.
    input_tensor_list : sequence of torch.Tensor
        One per rank of the group, of one dtype; shapes may differ.
    group : ProcessGroup, optional
        None means the default group.

    Returns
    -------
    tuple of torch.Tensor
        In the memory of the outputs, and with gradients, which those themselves have not.

    Raises
    ------
    ValueError, TypeError, DistMismatchError, DistTimeoutError
        See :func:`hpcdist.all_to_all`, which it calls; backward may raise the same errors.

    Notes
    -----
    Source: ``torch.distributed.nn.functional.all_to_all``.
    """
    pg = member(group)
    outputs = nodes.one_per_rank(pg, output_tensor_list, "output_tensor_list")
    inputs = nodes.one_per_rank(pg, input_tensor_list, "input_tensor_list")
    return tuple(nodes.AllToAll.apply(outputs, None, pg, None, *inputs))


@nodes.collective
def all_to_all_single(
    output: torch.Tensor,
    input: torch.Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: ProcessGroup | None = None,
) -> torch.Tensor:
    """Send the i-th part of a tensor to rank i, and receive a part from each rank.

    All ranks of the group must call it, and all or none must run backward through it.

    Parameters
    ----------
    output : torch.Tensor
        Memory for the result, split along dimension 0.
    input : torch.Tensor
        What goes out, split along dimension 0.
    output_split_sizes, input_split_sizes : sequence of int, optional
        Rows received from, and sent to, each rank. None or empty: equal parts.
    group : ProcessGroup, optional
        None means the default group.

    Returns
    -------
    torch.Tensor
        In the memory of `output`, and with a gradient, which `output` itself has not.

    Raises
    ------
    ValueError, TypeError, DistMismatchError, DistTimeoutError
        See :func:`hpcdist.all_to_all_single`, which it calls; backward may raise the same errors.

    Notes
    -----
    Source: ``torch.distributed.nn.functional.all_to_all_single``.
    """
    pg = member(group)
    splits = split_sizes(pg.carrier, input, output_split_sizes, input_split_sizes)
    return nodes.AllToAllSingle.apply(input, [output], None, splits, pg)
