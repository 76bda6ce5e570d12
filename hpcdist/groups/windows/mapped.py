"""A rank's memory in a window that this process has mapped: reads and writes are copies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hpcdist._engine import Part
from hpcdist.errors import DistBackendError
from hpcdist.groups.windows.data import elements_of, fill_from

if TYPE_CHECKING:
    import torch


class MappedPart:
    """Memory that this process has mapped: of this rank, or of another one of the node.

    The data are where they belong when a call returns, also with `later`.

    Parameters
    ----------
    comm : Comm
        The group's.
    tensor : torch.Tensor
        The memory, of one dimension.
    keeper : Part, optional
        Tells whether a rank's tensor still is where others have mapped it; None for this rank's.
    rank : int
        Whose memory it is.
    """

    def __init__(self, comm: Any, tensor: torch.Tensor, keeper: Part | None, rank: int) -> None:
        self._comm, self.tensor, self._keeper, self._rank = comm, tensor, keeper, rank
        self.dtype, self.numel = tensor.dtype, tensor.numel()

    def check(self, what: str) -> None:
        """Raise if the rank's tensor does not lie there any more; also after what was moved."""
        if self._keeper is not None and not self._keeper.whole:
            raise DistBackendError(
                f"{what}: the tensor of rank {self._rank} is no longer symmetric, because an "
                "operation on it failed while data moved; register another"
            )

    def _at(self, offset: int, n: int) -> torch.Tensor:
        return self.tensor[offset : offset + n]

    def put(
        self, tensor: torch.Tensor, offset: int, seconds: float | None, later: bool = False
    ) -> None:
        """Write a tensor there, from an element on."""
        there = self._at(offset, tensor.numel())
        source = elements_of(tensor, there)
        self._comm.refuse_nan(source, "put")
        there.copy_(source)

    def get(
        self, tensor: torch.Tensor, offset: int, seconds: float | None, later: bool = False
    ) -> None:
        """Read into a tensor, from an element on."""
        fill_from(tensor, self._at(offset, tensor.numel()), "get")

    def accumulate(
        self,
        tensor: torch.Tensor,
        offset: int,
        op: Any,
        seconds: float | None,
        later: bool = False,
    ) -> None:
        """Combine a tensor with what is there, from an element on."""
        there = self._at(offset, tensor.numel())
        source = elements_of(tensor, there)
        self._comm.refuse_nan(source, "accumulate")
        self._comm.accumulate(self._keeper, there, source, op, seconds)
