"""The reductions as methods of a group: ``pg.all_reduce(t)``."""

from __future__ import annotations

from typing import Any, Literal, overload

from hpcdist._engine import Work
from hpcdist._ops import ReduceOp
from hpcdist.backends.carrier import Carrier
from hpcdist.groups.tensors import as_list, reals_or_raise, sparse_or_raise

__all__ = ["Reductions"]


class Reductions:
    """The part of :class:`hpcdist.ProcessGroup` that reduces.

    Ranks are group ranks. Each method makes one native call, which checks the arguments.
    """

    __slots__ = ()

    # of ProcessGroup
    carrier: Carrier
    _root: Any

    @overload
    def all_reduce(self, tensor: Any, op: Any = ..., async_op: Literal[False] = ...) -> None: ...

    @overload
    def all_reduce(self, tensor: Any, op: Any = ..., *, async_op: Literal[True]) -> Work: ...

    @overload
    def all_reduce(self, tensor: Any, op: Any = ..., async_op: bool = ...) -> Work | None: ...

    def all_reduce(
        self, tensor: Any, op: Any = ReduceOp.SUM, async_op: bool = False
    ) -> Work | None:
        """Reduce `tensor` over all ranks, in place; the result is bitwise the same on each.

        All ranks of the group must call it. See :func:`hpcdist.all_reduce`.
        """
        try:
            return self.carrier.all_reduce(tensor, op, async_op)
        except TypeError:
            return sparse_or_raise(self.carrier, tensor, op, async_op)

    @overload
    def all_reduce_coalesced(
        self, tensors: Any, op: Any = ..., async_op: Literal[False] = ...
    ) -> None: ...

    @overload
    def all_reduce_coalesced(
        self, tensors: Any, op: Any = ..., *, async_op: Literal[True]
    ) -> Work: ...

    @overload
    def all_reduce_coalesced(
        self, tensors: Any, op: Any = ..., async_op: bool = ...
    ) -> Work | None: ...

    def all_reduce_coalesced(
        self, tensors: Any, op: Any = ReduceOp.SUM, async_op: bool = False
    ) -> Work | None:
        """Reduce several tensors over all ranks in one operation, in place.

        All ranks of the group must call it. See :func:`hpcdist.all_reduce_coalesced`.
        """
        listed = as_list(tensors)
        try:
            return self.carrier.all_reduce_coalesced(listed, op, async_op)
        except TypeError as error:
            return reals_or_raise(self.carrier, listed, op, async_op, error)

    @overload
    def reduce(
        self, tensor: Any, group_dst: int, op: Any = ..., async_op: Literal[False] = ...
    ) -> None: ...

    @overload
    def reduce(
        self, tensor: Any, group_dst: int, op: Any = ..., *, async_op: Literal[True]
    ) -> Work: ...

    @overload
    def reduce(
        self, tensor: Any, group_dst: int, op: Any = ..., async_op: bool = ...
    ) -> Work | None: ...

    def reduce(
        self, tensor: Any, group_dst: int, op: Any = ReduceOp.SUM, async_op: bool = False
    ) -> Work | None:
        """Reduce over all ranks onto one; the other ranks' `tensor` is not changed.

        All ranks of the group must call it. See :func:`hpcdist.reduce`.
        """
        root = self._root("reduce", tensor, None, group_dst, "dst")
        return self.carrier.reduce(tensor, root, op, async_op)

    @overload
    def reduce_scatter(
        self, output: Any, input_list: Any, op: Any = ..., async_op: Literal[False] = ...
    ) -> None: ...

    @overload
    def reduce_scatter(
        self, output: Any, input_list: Any, op: Any = ..., *, async_op: Literal[True]
    ) -> Work: ...

    @overload
    def reduce_scatter(
        self, output: Any, input_list: Any, op: Any = ..., async_op: bool = ...
    ) -> Work | None: ...

    def reduce_scatter(
        self, output: Any, input_list: Any, op: Any = ReduceOp.SUM, async_op: bool = False
    ) -> Work | None:
        """Reduce a list over all ranks, element by element; rank i keeps element i.

        All ranks of the group must call it. See :func:`hpcdist.reduce_scatter`.
        """
        return self.carrier.reduce_scatter(output, input_list, op, async_op)

    @overload
    def reduce_scatter_tensor(
        self, output: Any, input: Any, op: Any = ..., async_op: Literal[False] = ...
    ) -> None: ...

    @overload
    def reduce_scatter_tensor(
        self, output: Any, input: Any, op: Any = ..., *, async_op: Literal[True]
    ) -> Work: ...

    @overload
    def reduce_scatter_tensor(
        self, output: Any, input: Any, op: Any = ..., async_op: bool = ...
    ) -> Work | None: ...

    def reduce_scatter_tensor(
        self, output: Any, input: Any, op: Any = ReduceOp.SUM, async_op: bool = False
    ) -> Work | None:
        """Reduce a tensor over all ranks; rank i keeps its i-th part.

        All ranks of the group must call it. See :func:`hpcdist.reduce_scatter_single`.
        """
        return self.carrier.reduce_scatter_tensor(output, input, op, async_op)

    reduce_scatter_single = reduce_scatter_tensor
