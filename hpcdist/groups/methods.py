"""The collectives as methods of a group: ``pg.all_reduce(t)``."""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np

from hpcdist._engine import Work, complex_among
from hpcdist._ops import ReduceOp
from hpcdist.backends.dispatch import agreeing

__all__ = ["Collectives"]


def as_list(tensors: Any) -> Any:
    """Return a single tensor as a list of one, as torch allows."""
    return tensors if isinstance(tensors, (list, tuple)) else [tensors]


def _as_reals(tensors: Any, op: Any) -> list[Any] | None:
    """Return complex tensors as views of pairs of real numbers: their sums are the same.

    Return None if the views are not of one dtype, or the result would not be the same.
    """
    if getattr(op, "name", "") not in ("SUM", "AVG", "PREMUL_SUM"):
        return None
    views = []
    for tensor in tensors:
        if isinstance(tensor, np.ndarray):
            views.append(tensor.view(tensor.real.dtype) if tensor.dtype.kind == "c" else tensor)
        elif getattr(tensor, "is_complex", bool)():
            views.append(sys.modules["torch"].view_as_real(tensor))
        else:
            views.append(tensor)
    changed = any(view is not tensor for view, tensor in zip(views, tensors, strict=True))
    return views if changed else None


def sparse_or_raise(comm: Any, tensor: Any, op: Any, async_op: bool) -> Work | None:
    """Reduce a tensor that was refused because it is sparse; re-raise if it is not sparse.

    It is called while the TypeError is handled, so a dense tensor pays nothing for it.
    """
    if not getattr(tensor, "is_sparse", False):
        raise  # noqa: PLE0704  # the others have heard
    from hpcdist.groups import sparse

    sparse.all_reduce(comm, tensor, op, async_op)
    return None


def reals_or_raise(
    comm: Any, tensors: Any, op: Any, async_op: bool, error: TypeError
) -> Work | None:
    """Reduce a list that was refused because it mixes complex and real tensors; else re-raise.

    It is called while the TypeError is handled. Complex tensors count as pairs of real numbers.
    """
    views = _as_reals(tensors, op)
    if views is None:
        if complex_among(tensors):  # else the other ranks have the reason already
            agreeing(comm, tensors).refuse(error, api="all_reduce_coalesced")
        raise error
    work: Work | None = comm.all_reduce_coalesced(views, op, async_op)
    return work


def _stacked(tensor: Any, whole: Any, size: int) -> list[Any]:
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
    return list(whole.reshape(size, *shape))


class Collectives:
    """The part of :class:`hpcdist.ProcessGroup` that moves data among all its ranks.

    Ranks are group ranks. Each method makes one native call, which checks the arguments.
    """

    __slots__ = ()

    # of ProcessGroup
    _comm: Any
    _name: str
    _root: Any

    def _listed(self, api: str, tensor: Any, given: Any, root: int, role: str) -> bool:
        """Whether this rank is the root, the only rank that has a list."""
        comm = self._comm
        here = bool(comm.rank == root)
        if here is bool(given):
            return here
        if here:
            where = f"rank (rank {root} of the group {self._name!r}, which this process is)"
        else:
            where = (
                f"rank only (rank {root} of the group {self._name!r}; this process is rank "
                f"{comm.rank})"
            )
        error = ValueError(f"{api}_list must be given on the {role} {where}")
        agreeing(comm, tensor).refuse(error, api=api)
        raise error

    def _gather(self, tensor: Any, gather_list: Any, root: int, async_op: bool) -> Work | None:
        """Gather; only the root may have a list."""
        here = self._listed("gather", tensor, gather_list, root, "destination")
        return self._comm.gather(tensor, gather_list if here else None, root, async_op)

    def _gather_single(self, tensor: Any, whole: Any, root: int, async_op: bool) -> Work | None:
        """Gather into one tensor; only the root may have one."""
        comm = self._comm
        try:
            if (whole is not None) is not (comm.rank == root):
                where = "must be given" if whole is None else "must be None"
                raise ValueError(
                    f"gather_tensor {where} on rank {comm.rank} of the group {self._name!r}, whose "
                    f"destination is rank {root}"
                )
            parts = None if whole is None else _stacked(tensor, whole, comm.size)
        except Exception as error:
            agreeing(comm, tensor).refuse(error, api="gather_single")
            raise
        return comm.gather(tensor, parts, root, async_op, api="gather_single")

    def _scatter(self, tensor: Any, scatter_list: Any, root: int, async_op: bool) -> Work | None:
        """Scatter; only the root may have a list."""
        here = self._listed("scatter", tensor, scatter_list, root, "source")
        return self._comm.scatter(tensor, scatter_list if here else None, root, async_op)

    def all_reduce(
        self, tensor: Any, op: Any = ReduceOp.SUM, async_op: bool = False
    ) -> Work | None:
        """Reduce `tensor` over all ranks, in place; the result is bitwise the same on each.

        All ranks of the group must call it. See :func:`hpcdist.all_reduce`.
        """
        try:
            return self._comm.all_reduce(tensor, op, async_op)
        except TypeError:
            return sparse_or_raise(self._comm, tensor, op, async_op)

    def all_reduce_coalesced(
        self, tensors: Any, op: Any = ReduceOp.SUM, async_op: bool = False
    ) -> Work | None:
        """Reduce several tensors over all ranks in one operation, in place.

        All ranks of the group must call it. See :func:`hpcdist.all_reduce_coalesced`.
        """
        listed = as_list(tensors)
        try:
            return self._comm.all_reduce_coalesced(listed, op, async_op)
        except TypeError as error:
            return reals_or_raise(self._comm, listed, op, async_op, error)

    def broadcast(self, tensor: Any, group_src: int, async_op: bool = False) -> Work | None:
        """Copy the tensor of one rank to all.

        All ranks of the group must call it. See :func:`hpcdist.broadcast`.
        """
        root = self._root("broadcast", tensor, None, group_src, "src")
        return self._comm.broadcast(tensor, root, async_op)

    def reduce(
        self, tensor: Any, group_dst: int, op: Any = ReduceOp.SUM, async_op: bool = False
    ) -> Work | None:
        """Reduce over all ranks onto one; the other ranks' `tensor` is not changed.

        All ranks of the group must call it. See :func:`hpcdist.reduce`.
        """
        root = self._root("reduce", tensor, None, group_dst, "dst")
        return self._comm.reduce(tensor, root, op, async_op)

    def all_gather(self, tensor_list: Any, tensor: Any, async_op: bool = False) -> Work | None:
        """Collect a tensor of each rank in a list on all ranks; sizes may differ between ranks.

        All ranks of the group must call it. See :func:`hpcdist.all_gather`.
        """
        return self._comm.all_gather(tensor_list, tensor, async_op)

    def all_gather_into_tensor(
        self, output_tensor: Any, input_tensor: Any, async_op: bool = False
    ) -> Work | None:
        """Collect equal tensors of all ranks into one tensor on all ranks.

        All ranks of the group must call it. See :func:`hpcdist.all_gather_single`.
        """
        return self._comm.all_gather_into_tensor(output_tensor, input_tensor, async_op)

    def all_gather_coalesced(
        self, output_tensor_lists: Any, input_tensor_list: Any, async_op: bool = False
    ) -> Work | None:
        """Collect several tensors of each rank on all ranks in one operation.

        All ranks of the group must call it. See :func:`hpcdist.all_gather_coalesced`.
        """
        return self._comm.all_gather_coalesced(output_tensor_lists, input_tensor_list, async_op)

    def gather(
        self, tensor: Any, gather_list: Any = None, group_dst: int = 0, async_op: bool = False
    ) -> Work | None:
        """Collect a tensor of each rank in a list on one rank.

        All ranks of the group must call it. See :func:`hpcdist.gather`.
        """
        root = self._root("gather", tensor, None, group_dst, "dst")
        return self._gather(tensor, gather_list, root, async_op)

    def gather_single(
        self, tensor: Any, gather_tensor: Any = None, group_dst: int = 0, async_op: bool = False
    ) -> Work | None:
        """Collect equal tensors of all ranks in one tensor on one rank.

        All ranks of the group must call it. See :func:`hpcdist.gather_single`.
        """
        root = self._root("gather_single", tensor, None, group_dst, "dst")
        return self._gather_single(tensor, gather_tensor, root, async_op)

    def scatter(
        self, tensor: Any, scatter_list: Any = None, group_src: int = 0, async_op: bool = False
    ) -> Work | None:
        """Give each rank its tensor of one rank's list.

        All ranks of the group must call it. See :func:`hpcdist.scatter`.
        """
        root = self._root("scatter", tensor, None, group_src, "src")
        return self._scatter(tensor, scatter_list, root, async_op)

    def reduce_scatter(
        self, output: Any, input_list: Any, op: Any = ReduceOp.SUM, async_op: bool = False
    ) -> Work | None:
        """Reduce a list over all ranks, element by element; rank i keeps element i.

        All ranks of the group must call it. See :func:`hpcdist.reduce_scatter`.
        """
        return self._comm.reduce_scatter(output, input_list, op, async_op)

    def reduce_scatter_tensor(
        self, output: Any, input: Any, op: Any = ReduceOp.SUM, async_op: bool = False
    ) -> Work | None:
        """Reduce a tensor over all ranks; rank i keeps its i-th part.

        All ranks of the group must call it. See :func:`hpcdist.reduce_scatter_single`.
        """
        return self._comm.reduce_scatter_tensor(output, input, op, async_op)

    def all_to_all(
        self, output_tensor_list: Any, input_tensor_list: Any, async_op: bool = False
    ) -> Work | None:
        """Send the i-th input to rank i and receive the i-th output from it.

        All ranks of the group must call it. See :func:`hpcdist.all_to_all`.
        """
        return self._comm.all_to_all(output_tensor_list, input_tensor_list, async_op)

    def all_to_all_single(
        self,
        output: Any,
        input: Any,
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        async_op: bool = False,
    ) -> Work | None:
        """Send the i-th part of a tensor to rank i and receive the i-th part of another from it.

        All ranks of the group must call it. See :func:`hpcdist.all_to_all_single`.
        """
        return self._comm.all_to_all_single(
            output, input, output_split_sizes or None, input_split_sizes or None, async_op
        )

    def barrier(self, async_op: bool = False) -> Work | None:
        """Wait until all ranks of the group have called.

        All ranks of the group must call it. See :func:`hpcdist.barrier`.
        """
        return self._comm.barrier(async_op)

    all_gather_single = all_gather_into_tensor
    gather_into_tensor = gather_single
    reduce_scatter_single = reduce_scatter_tensor
