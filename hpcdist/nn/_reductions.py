"""Reductions and broadcast with derivatives."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hpcdist._ops import ReduceOp
from hpcdist.groups.resolve import member
from hpcdist.groups.state import ProcessGroup
from hpcdist.nn import _nodes as nodes
from hpcdist.typing import Op

_SUM = ReduceOp.SUM
_LINEAR = ("SUM", "AVG", "PREMUL_SUM")
_DERIVED = ("MIN", "MAX", "PRODUCT")


def _op(op: Op, *tensors: torch.Tensor) -> ReduceOp:
    """Normalise a reduce-op, and refuse what has no derivative."""
    op = ReduceOp(op)
    if op.name in ("BAND", "BOR", "BXOR") and any(t.requires_grad for t in tensors):
        raise ValueError(f"{op.name} has no derivative; pass tensors that require no gradient")
    return op


@nodes.collective
def broadcast(tensor: torch.Tensor, src: int, group: ProcessGroup | None = None) -> torch.Tensor:
    """Give all ranks one rank's tensor.

    All ranks of the group must call it, and all or none must run backward through it.

    Parameters
    ----------
    tensor : torch.Tensor
        What `src` sends; on the others a tensor of the same shape and dtype, whose values do not
        matter.
    src : int
        The source, as a rank of the world.
    group : ProcessGroup, optional
        None means the default group.

    Returns
    -------
    torch.Tensor
        The source's values. Their gradients are summed on the source; elsewhere they are zero.

    Raises
    ------
    ValueError, TypeError, DistMismatchError, DistTimeoutError
        See :func:`hpcdist.broadcast`, which it calls; backward may raise the same errors.

    Notes
    -----
    Source: ``torch.distributed.nn.functional.broadcast``.
    """
    pg = member(group)
    return nodes.Broadcast.apply(tensor, pg.members.place(src, None, "src"), pg)


@nodes.collective
def all_reduce(
    tensor: torch.Tensor, op: Op = _SUM, group: ProcessGroup | None = None
) -> torch.Tensor:
    """Reduce a tensor over all ranks; all get the result.

    All ranks of the group must call it, and all or none must run backward through it.

    Parameters
    ----------
    tensor : torch.Tensor
        The same shape and dtype on all ranks.
    op : ReduceOp
        SUM, AVG, PREMUL_SUM(factor), MIN, MAX or PRODUCT; others without a gradient only.
    group : ProcessGroup, optional
        None means the default group.

    Returns
    -------
    torch.Tensor
        The same bits on all ranks. The gradients of all ranks are summed (and scaled, like the
        result). With MIN and MAX they go to the ranks that hold the result, in equal parts.

    Raises
    ------
    ValueError, TypeError, DistMismatchError, DistTimeoutError
        See :func:`hpcdist.all_reduce`, which it calls; backward may raise the same errors.

    Notes
    -----
    Source: ``torch.distributed.nn.functional.all_reduce``. Its
    backward for MIN, MAX and PRODUCT reduces the gradients with that operation, which is not the
    derivative.
    """
    pg = member(group)
    op = _op(op, tensor)
    if op.name in _DERIVED:
        return _derived(tensor, op, pg, None)
    return nodes.AllReduce.apply(tensor, op, pg, None)


def _derived(
    tensor: torch.Tensor, op: ReduceOp, group: ProcessGroup | None, name: str | None
) -> torch.Tensor:
    """all_reduce with an operation that is not linear; ranks compare `name`, if it is another."""
    if op.name == "PRODUCT":
        return nodes.AllReduceProduct.apply(tensor, group, name)
    return nodes.AllReduceExtreme.apply(tensor, op, group, name)


@nodes.collective
def reduce(
    tensor: torch.Tensor,
    dst: int,
    op: Op = _SUM,
    group: ProcessGroup | None = None,
) -> torch.Tensor:
    """Reduce a tensor over all ranks; one gets the result.

    All ranks of the group must call it, and all or none must run backward through it.

    Parameters
    ----------
    tensor : torch.Tensor
        The same shape and dtype on all ranks.
    dst : int
        Which rank of the world gets the result.
    op : ReduceOp
        See :func:`all_reduce`.
    group : ProcessGroup, optional
        None means the default group.

    Returns
    -------
    torch.Tensor
        The result on `dst`, zeros elsewhere; what happens to those zeros has no gradient.

    Raises
    ------
    ValueError, TypeError, DistMismatchError, DistTimeoutError
        See :func:`hpcdist.reduce`, which it calls; backward may raise the same errors.

    Notes
    -----
    Source: ``torch.distributed.nn.functional.reduce``. It
    returns the input on the other ranks.
    """
    pg = member(group)
    op = _op(op, tensor)
    root = pg.members.place(dst, None, "dst")
    if op.name in _DERIVED:
        everywhere = _derived(tensor, op, pg, f"reduce to rank {root}")
        here = torch.tensor(pg.rank() == root, device=tensor.device)
        return torch.where(here, everywhere, torch.zeros_like(everywhere))
    return nodes.Reduce.apply(tensor, root, op, pg)


@nodes.collective
def reduce_scatter(
    output: torch.Tensor,
    input_list: Sequence[torch.Tensor],
    op: Op = _SUM,
    group: ProcessGroup | None = None,
) -> torch.Tensor:
    """Reduce a list of tensors over all ranks; each rank keeps one.

    All ranks of the group must call it, and all or none must run backward through it.

    Parameters
    ----------
    output : torch.Tensor
        Memory for the result, of the shape of element ``rank`` of the list.
    input_list : sequence of torch.Tensor
        One per rank of the group; element i has the same shape on all ranks.
    op : ReduceOp
        See :func:`all_reduce`.
    group : ProcessGroup, optional
        None means the default group.

    Returns
    -------
    torch.Tensor
        In the memory of `output`, and with a gradient, which `output` itself has not.

    Raises
    ------
    ValueError, TypeError, DistMismatchError, DistTimeoutError
        See :func:`hpcdist.reduce_scatter`, which it calls; backward may raise the same errors.

    Notes
    -----
    Source: ``torch.distributed.nn.functional.reduce_scatter``.
    """
    pg = member(group)
    inputs = nodes.one_per_rank(pg, input_list, "input_list")
    op = _op(op, *inputs)
    if op.name in _LINEAR:
        return nodes.ReduceScatter.apply([output], op, pg, *inputs)
    return _exchanged(output, inputs, op, pg)


@nodes.collective
def reduce_scatter_single(
    output: torch.Tensor,
    input: torch.Tensor,
    op: Op = _SUM,
    group: ProcessGroup | None = None,
) -> torch.Tensor:
    """Reduce a tensor over all ranks; each rank keeps one part.

    All ranks of the group must call it, and all or none must run backward through it.

    Parameters
    ----------
    output : torch.Tensor
        Memory for the result.
    input : torch.Tensor
        As many elements as `output` times the group's size: the concatenation or the stack of the
        parts.
    op : ReduceOp
        See :func:`all_reduce`.
    group : ProcessGroup, optional
        None means the default group.

    Returns
    -------
    torch.Tensor
        In the memory of `output`, and with a gradient, which `output` itself has not.

    Raises
    ------
    ValueError, TypeError, DistMismatchError, DistTimeoutError
        See :func:`hpcdist.reduce_scatter`; backward may raise the same errors.

    Notes
    -----
    Source: ``torch.distributed.nn.functional``. There
    is no such function there; ``torch.distributed.reduce_scatter_single`` has no backward.
    """
    pg = member(group)
    op = _op(op, input)
    if op.name in _LINEAR:
        return nodes.ReduceScatterSingle.apply(input, [output], output.shape, op, pg)
    if input.numel() != output.numel() * pg.size():
        raise ValueError(
            f"input has {input.numel()} elements, not {pg.size()} times the {output.numel()} of "
            "output"
        )
    parts = input.reshape(pg.size(), *output.shape).unbind(0)
    return _exchanged(output, parts, op, pg)


def _exchanged(
    output: torch.Tensor, inputs: Sequence[torch.Tensor], op: ReduceOp, group: ProcessGroup
) -> torch.Tensor:
    """reduce_scatter with an operation that is not linear: exchange the parts, reduce here."""
    mine = inputs[group.rank()]
    # A rank may need no gradient where others do, but the dtype is the same on all. The engine says
    # why complex numbers have no extreme.
    complex_product = mine.is_complex() and op.name == "PRODUCT"
    if op.name not in _DERIVED or not (mine.is_floating_point() or complex_product):
        group.carrier.reduce_scatter(output, [nodes.plain(part) for part in inputs], op)
        return output
    if output.shape != mine.shape or output.dtype != mine.dtype:
        raise ValueError(
            f"output must be like element {group.rank()} of the inputs, {tuple(mine.shape)} of "
            f"{mine.dtype}, not {tuple(output.shape)} of {output.dtype}"
        )
    shapes, name = [mine.shape] * group.size(), f"reduce_scatter ({op.name})"
    parts = torch.stack(nodes.AllToAll.apply(None, shapes, group, name, *inputs))
    if op.name == "PRODUCT":
        reduced = parts.prod(0)
    else:
        reduced = parts.amin(0) if op.name == "MIN" else parts.amax(0)
    return nodes.Into.apply(reduced, [output])
