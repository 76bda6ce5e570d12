"""Sums of sparse tensors, whose entries and their number differ per rank.

There are two rounds: the ranks exchange the number of their entries, then the entries, and each
rank adds them up.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from hpcdist._engine import plain_floats
from hpcdist._ops import ReduceOp
from hpcdist.backends.carrier import Carrier
from hpcdist.backends.dispatch import agreeing
from hpcdist.backends.refusal import refusing, refusing_parts
from hpcdist.groups.comparison import digest, naming

API = "all_reduce of a sparse tensor"


class SparseReduction:
    """The sum of all ranks' sparse tensors, in flight.

    Parameters
    ----------
    comm : Comm
        All ranks must make one, and wait for it, in the same order of operations.
    tensor : torch.Tensor
        Sparse COO, coalesced; shape and number of sparse dimensions are the same on all ranks.
    divisor : int
        What to divide the sum by, the same on all ranks.
    api : str
        Name of the operation in messages.
    extra : int, optional
        A number that must be the same on all ranks, in place of the digest of tensor and divisor.

    Raises
    ------
    DistMismatchError
        On all ranks, when they wait, if one divides and another does not, or `extra` differs.

    Attributes
    ----------
    made : int
        How many of :attr:`WAITS` this rank has made.
    """

    #: Collectives that :meth:`wait` makes.
    WAITS = 2

    def __init__(
        self, comm: Carrier, tensor: torch.Tensor, divisor: int, api: str, extra: int | None = None
    ) -> None:
        self._comm, self._tensor, self._divisor = comm, tensor, divisor
        # Each rank divides by itself: no collective has the operation among its own arguments.
        self._api = api = f"{api} ({'SUM' if divisor == 1 else 'AVG'})"
        if extra is None:
            shape, dims = tuple(tensor.shape), tensor.sparse_dim()
            extra = digest(shape, dims, str(tensor.dtype), divisor)
        own = np.array([tensor._nnz()], np.int64)
        self._counts = np.empty(comm.size, np.int64)
        self.made = 0
        self._work = comm.all_gather_into_tensor(self._counts, own, True, api=api, extra=extra)

    def give_up(self) -> None:
        """Wait for what is under way, and begin no more."""
        self._work.wait()

    @property
    def _agreeing(self) -> Carrier:
        return agreeing(self._comm, self._tensor)

    @contextmanager
    def _counting(self) -> Iterator[None]:
        comm = self._agreeing
        before = comm.seq
        try:
            yield
        finally:
            self.made = (comm.seq - before) % 2**32

    def wait(self) -> torch.Tensor:
        """Exchange the entries and add them up.

        Returns
        -------
        torch.Tensor
            Sparse COO, coalesced; bitwise the same on every rank.
        """
        with naming("shape, number of sparse dimensions, dtype and divisor"):
            self._work.wait()
        counts = self._counts.tolist()
        shape, dims = self._tensor.shape, self._tensor.sparse_dim()
        with self._counting(), refusing_parts(self._agreeing, self._api, 1 + self.WAITS, begun=1):
            values = self._tensor._values().contiguous()
            places = self._tensor._indices().T.contiguous()
            all_places = places.new_empty(sum(counts), dims)
            all_values = values.new_empty(sum(counts), *shape[dims:])
            self._comm.all_gather(list(all_places.split(counts)), places)
            self._comm.all_gather(list(all_values.split(counts)), values)
        kind = all_values.dtype
        if self._divisor != 1 and kind in (torch.float16, torch.bfloat16):
            all_values = all_values.float()  # the sum may be too large for it, and the mean is not
        total = torch.sparse_coo_tensor(all_places.T, all_values, shape, check_invariants=False)
        whole = not kind.is_floating_point and not kind.is_complex
        with plain_floats():
            total = total.coalesce()
            if self._divisor == 1:
                return total
            mean = total._values().div_(self._divisor, rounding_mode="trunc" if whole else None)
        return torch.sparse_coo_tensor(
            total._indices(), mean.to(kind), shape, is_coalesced=True, check_invariants=False
        )


def all_reduce(comm: Carrier, tensor: torch.Tensor, op: Any, async_op: bool = False) -> None:
    """Add up the sparse tensors of all ranks, in place on each.

    All ranks of the group must call it.

    Parameters
    ----------
    comm : Comm
        Communicator of the ranks.
    tensor : torch.Tensor
        Sparse COO; its shape and its number of sparse dimensions are the same on all ranks, its
        entries need not be. Afterwards it is coalesced.
    op : ReduceOp
        SUM or AVG, in hpcdist's words or torch's.
    async_op : bool
        Must be false: there are two rounds, and nothing would begin the second.

    Raises
    ------
    ValueError
        If the operation is another, or `async_op` is true.
    TypeError
        If it is none.
    DistError
        If a rank does not take part, or has another shape, dtype or operation.
    """
    with refusing(agreeing(comm, tensor), "all_reduce"):
        how = ReduceOp(op)
        if how not in (ReduceOp.SUM, ReduceOp.AVG):
            raise ValueError(f"all_reduce of a sparse tensor has SUM and AVG, not {how}")
        if async_op:
            raise ValueError(
                "all_reduce of a sparse tensor takes two rounds: async_op must be False"
            )
    divisor = comm.size if how == ReduceOp.AVG else 1
    with torch.no_grad(), refusing_parts(agreeing(comm, tensor), API, 3):
        with plain_floats():
            own = tensor.coalesce()
        tensor.copy_(SparseReduction(comm, own, divisor, API).wait())
