"""What the collectives do with tensors that the backends do not take as they are."""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np

from hpcdist._engine import Work, complex_among
from hpcdist._ops import ReduceOp
from hpcdist.backends.carrier import Carrier
from hpcdist.backends.dispatch import agreeing
from hpcdist.errors import was_told
from hpcdist.typing import Op, Tensors


def as_list(tensors: Any) -> Any:
    """Return a single tensor as a list of one, as torch allows."""
    return tensors if isinstance(tensors, (list, tuple)) else [tensors]


def _as_reals(tensors: Tensors, op: Op) -> list[Any] | None:
    """Return complex tensors as views of pairs of real numbers: their sums are the same.

    Return None if the views are not of one dtype, or the result would not be the same.
    """
    try:
        if ReduceOp(op).name not in ("SUM", "AVG", "PREMUL_SUM"):
            return None
    except TypeError:  # it is none: that was the error
        return None
    views: list[Any] = []
    try:
        for tensor in tensors:
            if isinstance(tensor, np.ndarray):
                views.append(tensor.view(tensor.real.dtype) if tensor.dtype.kind == "c" else tensor)
            elif getattr(tensor, "is_complex", bool)():
                views.append(sys.modules["torch"].view_as_real(tensor))
            else:
                views.append(tensor)
    except (RuntimeError, ValueError):  # a lazy conjugate, a sparse tensor, an array with gaps
        return None
    changed = any(view is not tensor for view, tensor in zip(views, tensors, strict=True))
    return views if changed else None


def sparse_or_raise(
    comm: Carrier, tensor: Any, op: Op, async_op: bool, error: TypeError
) -> Work | None:
    """Reduce a tensor that was refused because it is sparse; else re-raise.

    It is called while the TypeError is handled, so a dense tensor pays nothing for it.
    """
    if was_told(error) or not getattr(tensor, "is_sparse", False):
        raise error
    from hpcdist.groups import sparse

    sparse.all_reduce(comm, tensor, op, async_op)
    return None


def reals_or_raise(
    comm: Carrier, tensors: Tensors, op: Op, async_op: bool, error: TypeError
) -> Work | None:
    """Reduce a list that was refused because it mixes complex and real tensors; else re-raise.

    It is called while the TypeError is handled. Complex tensors count as pairs of real numbers.
    """
    if was_told(error):
        raise error
    views = _as_reals(tensors, op)
    if views is None:
        if complex_among(tensors):  # else the other ranks have the reason already
            agreeing(comm, tensors).refuse(error, api="all_reduce_coalesced")
        raise error
    return comm.all_reduce_coalesced(views, op, async_op)


def stacked(tensor: Any, whole: Any, size: int) -> list[Any]:
    """Return the parts of one tensor, for `size` tensors of the shape of `tensor`."""
    for name, each in (("tensor", tensor), ("gather_tensor", whole)):
        if not hasattr(each, "reshape"):
            raise TypeError(
                f"{name} must be a torch.Tensor or a numpy.ndarray, not {type(each).__name__}"
            )
    shape = tuple(tensor.shape)
    wanted = size * math.prod(shape)
    if math.prod(whole.shape) != wanted:
        raise ValueError(
            f"gather_tensor has {math.prod(whole.shape)} elements, and {size} ranks send "
            f"{math.prod(shape)} each: it must have {wanted}"
        )
    contiguous = (
        whole.flags.c_contiguous if isinstance(whole, np.ndarray) else whole.is_contiguous()
    )
    if not contiguous:
        raise ValueError("gather_tensor must be contiguous: pass a new tensor and copy from it")
    parts = whole.reshape(size, *shape)
    return [parts[rank, ...] for rank in range(size)]  # also of arrays without dimensions
