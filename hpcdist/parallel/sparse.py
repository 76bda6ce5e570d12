"""Sparse gradients: every rank has other rows, and not equally many of them.

Two rounds. The ranks tell each other how many rows they have, which starts during backward with the
other buckets; at the end of backward they exchange the rows, and each adds up what came.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["SparseBucket", "all_reduce_sparse"]

API = "DistributedDataParallel: sparse gradient"


class SparseReduction:
    """The sum of all ranks' sparse tensors, under way.

    Parameters
    ----------
    comm : Comm
        All ranks must make one, and wait for it, in the same order of operations.
    tensor : torch.Tensor
        Sparse COO with one sparse dimension, coalesced.
    divisor : int
        What to divide the sum by.
    extra : int
        See :class:`~hpcdist.parallel.reducer.Reducer`.
    """

    def __init__(self, comm: Any, tensor: torch.Tensor, divisor: int, extra: int = 0) -> None:
        self._comm, self._tensor, self._divisor, self._extra = comm, tensor, divisor, extra
        own = torch.tensor([tensor._nnz()], dtype=torch.int64)
        self._counts = torch.empty(comm.size, dtype=torch.int64)
        self._work = comm.all_gather_into_tensor(self._counts, own, True, api=API, extra=extra)

    def wait(self) -> torch.Tensor:
        """Exchange the rows and add them up.

        Returns
        -------
        torch.Tensor
            Sparse COO, coalesced; the same bits on every rank.
        """
        self._work.wait()
        counts = self._counts.tolist()
        shape = self._tensor.shape
        values, rows = self._tensor._values().contiguous(), self._tensor._indices()[0].contiguous()
        all_rows = torch.empty(sum(counts), dtype=torch.int64)
        all_values = torch.empty(sum(counts), *shape[1:], dtype=values.dtype)
        self._comm.all_gather(list(all_rows.split(counts)), rows)
        self._comm.all_gather(list(all_values.split(counts)), values)
        total = torch.sparse_coo_tensor(all_rows[None], all_values, shape, check_invariants=False)
        total = total.coalesce()
        if self._divisor != 1:
            total._values().div_(self._divisor)
        return total


def by_rows(tensor: torch.Tensor) -> torch.Tensor:
    """The same values as a coalesced sparse tensor whose only sparse dimension is the first."""
    if not tensor.is_sparse:
        return tensor.to_sparse(1).coalesce()
    if tensor.sparse_dim() != 1:
        tensor = tensor.to_dense().to_sparse(1)
    return tensor.coalesce()


def all_reduce_sparse(tensor: torch.Tensor, group: Any, average: bool = True) -> torch.Tensor:
    """Add up sparse tensors of all ranks, which may have different rows.

    All ranks of the group must call it.

    Parameters
    ----------
    tensor : torch.Tensor
        Sparse COO; the shape is the same on all ranks, the number of entries need not be.
    group : ProcessGroup
        Between whose ranks.
    average : bool
        Divide by the number of ranks.

    Returns
    -------
    torch.Tensor
        Sparse COO, coalesced, with one sparse dimension; the same on all ranks.

    Raises
    ------
    DistError
        If a rank does not take part.
    """
    comm = group._comm
    return SparseReduction(comm, by_rows(tensor), comm.size if average else 1).wait()


class SparseBucket:
    """One parameter with sparse gradients, in the place of a :class:`Bucket`.

    Parameters
    ----------
    members : list of int
        The index of the parameter.
    parameters : sequence of torch.Tensor
        The parameter.
    """

    __slots__ = ("buffer", "members", "parameters", "pending", "unused", "work")

    sparse = True
    nbytes = 0  # nothing is kept between backward passes

    def __init__(self, members: list[int], parameters: Sequence[torch.Tensor]) -> None:
        self.members = members
        self.parameters = list(parameters)
        self.buffer = self.zeros()
        self.work: Any = None
        self.unused: list[int] = []
        self.pending = 1

    def zeros(self) -> torch.Tensor:
        """A gradient without entries."""
        p = self.parameters[0]
        return torch.sparse_coo_tensor(
            torch.empty(1, 0, dtype=torch.int64),
            torch.empty(0, *p.shape[1:], dtype=p.dtype),
            p.shape,
            is_coalesced=True,
            check_invariants=False,
        )

    def reset(self) -> None:
        """Make ready for the next backward pass."""
        self.pending = 1
        self.work = None
        self.unused = []

    def pack(self) -> None:
        """Take the gradient, if there is one."""
        gradient = self.parameters[0].grad
        self.buffer = self.zeros() if gradient is None else by_rows(gradient)

    def reduce(self, comm: Any, divisor: int | None, extra: int, buffer: Any = None) -> Any:
        """Begin to average it between ranks."""
        tensor = self.buffer if buffer is None else buffer
        return SparseReduction(comm, tensor, divisor or comm.size, extra)

    def take(self, result: torch.Tensor, keep: Sequence[int], divisor: int | None) -> None:
        """Make the result the parameter's gradient."""
        self.buffer = self.zeros()
        if not keep:
            self.parameters[0].grad = result
