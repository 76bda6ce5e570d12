"""Sparse gradients, whose rows and their number differ per rank.

The exchange of the numbers of rows starts during backward, with the other buckets; that of the rows
follows at the end of backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hpcdist._engine import counting, plain_floats
from hpcdist.backends.carrier import Carrier
from hpcdist.groups.process_group import ProcessGroup
from hpcdist.groups.sparse import SparseReduction

API = counting("DistributedDataParallel: sparse gradient", "backward pass")


def by_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return a coalesced sparse tensor of the same values, sparse only in the first dimension."""
    if not tensor.is_sparse:
        return tensor.to_sparse(1).coalesce()
    with plain_floats():  # entries of one place are added up
        if tensor.sparse_dim() != 1:
            tensor = tensor.to_dense().to_sparse(1)
        return tensor.coalesce()


def all_reduce_sparse(
    tensor: torch.Tensor, group: ProcessGroup, average: bool = True
) -> torch.Tensor:
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
    comm = group.carrier
    return SparseReduction(comm, by_rows(tensor), comm.size if average else 1, API).wait()


class SparseBucket:
    """One parameter with sparse gradients, used like a :class:`Bucket`.

    Parameters
    ----------
    members : list of int
        The index of the parameter.
    parameters : sequence of torch.Tensor
        The parameter.
    """

    __slots__ = ("buffer", "members", "parameters", "pending", "unused", "work")

    sparse = True
    single = False
    piece = 0
    nbytes = 0  # nothing is kept between backward passes

    def __init__(self, members: list[int], parameters: Sequence[torch.Tensor]) -> None:
        self.members = members
        self.parameters = list(parameters)
        self.buffer = self.zeros()
        self.work: Any = None
        self.unused: list[int] = []
        self.pending = 1

    def zeros(self) -> torch.Tensor:
        """Return a gradient without entries."""
        p = self.parameters[0]
        return torch.sparse_coo_tensor(
            torch.empty(1, 0, dtype=torch.int64, device=p.device),
            torch.empty(0, *p.shape[1:], dtype=p.dtype, device=p.device),
            p.shape,
            is_coalesced=True,
            check_invariants=False,
        )

    def reset(self) -> None:
        """Prepare for the next backward pass."""
        self.pending = 1
        self.work = None
        self.unused = []

    def pack(self, without_copy: bool = False) -> None:
        """Take the gradient, if there is one."""
        gradient = self.parameters[0].grad
        self.buffer = self.zeros() if gradient is None else by_rows(gradient)

    @property
    def waits(self) -> int:
        """Calls in which the other ranks may wait for its average, and that were not made here."""
        return SparseReduction.WAITS - getattr(self.work, "made", 0)

    def leave_out(self) -> None:
        """Contribute no entries, if this rank has not used the parameter."""
        self.unused = [0]
        self.buffer = self.zeros()

    def let_go(self) -> None:
        """Do nothing: the average becomes a gradient of its own."""

    def reduce(self, comm: Carrier, divisor: int | None, extra: int) -> Any:
        """Begin to average it between ranks."""
        return SparseReduction(comm, self.buffer, divisor or comm.size, API, extra)

    def take(self, result: torch.Tensor, keep: Sequence[int], divisor: int | None) -> None:
        """Make the result the parameter's gradient."""
        self.buffer = self.zeros()
        if not keep:
            parameter = self.parameters[0]
            if torch.can_cast(result.dtype, parameter.dtype):  # a hook's may be of another one
                result = result.to(parameter.dtype)
            parameter.grad = result
