"""Tensors as NCCL sees them, and the checks that all operations share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from hpcdist import _nccl, dtypes
from hpcdist._engine import disordered
from hpcdist.backends import cuda


class Region(NamedTuple):
    """The memory of a tensor; `shape` and `strides` are numbers that stand for them."""

    address: int
    elements: int
    dtype: int
    device: int
    shape: int
    strides: int

    @property
    def form(self) -> tuple[int, int, int]:
        """What ranks compare of it."""
        return self.dtype, self.shape, self.strides

    @property
    def size(self) -> int:
        """Number of bytes."""
        return self.elements * dtypes.lookup(self.dtype).itemsize


def region(tensor: Any, role: str, writable: bool = True) -> Region:
    """Return the memory of a tensor; `role` is its name in messages."""
    memory = cuda.runtime()
    return Region(*_nccl.region(tensor, writable, memory.memory, memory.name, role))


def message_region(tensor: Any, role: str, sends: bool) -> Region:
    """Return the memory of a tensor that is sent or received: its elements must be in C order."""
    found = region(tensor, role, not sends)
    if found.elements > 1 and not tensor.is_contiguous():
        raise disordered(sends)
    return found


def common_dtype(api: str, regions: Sequence[Region], what: str) -> int:
    """Return the one element type of some tensors."""
    kinds = {each.dtype for each in regions}
    if len(kinds) > 1:
        raise ValueError(f"{api}: {what} must have one dtype, and have {len(kinds)}")
    return next(iter(kinds), 1)


def check_count(api: str, found: int, wanted: int, what: str) -> None:
    """Raise unless a list or a tensor has as many elements as the operation needs."""
    if found != wanted:
        raise ValueError(f"{api}: {what} has {found} elements, and needs {wanted}")


def check_form(api: str, one: Region, other: Region, what: str) -> None:
    """Raise if bytes that are moved from one to the other would be those of other elements."""
    if one.elements > 1 and one.form != other.form:
        raise ValueError(
            f"{api}: {what} have different shapes, or their elements in different orders in memory "
            "(strides), and nothing is copied silently: pass contiguous tensors of one shape"
        )


def check_contiguous(api: str, found: Region, what: str) -> None:
    """Raise unless a tensor whose blocks are of different ranks is in C order."""
    if found.strides:
        raise ValueError(
            f"{api}: {what} must be C-contiguous, because its blocks are; pass {what}.contiguous()"
        )


def split_rows(api: str, tensor: Any, splits: Any, size: int, what: str) -> list[Any]:
    """Return the parts of a tensor along dimension 0, one per rank."""
    rows = int(tensor.shape[0]) if tensor.dim() else 0
    if not splits:
        if rows % size:
            raise ValueError(f"{api}: {what} has {rows} rows, which do not divide by {size} ranks")
        splits = [rows // size] * size
    if len(splits) != size or sum(splits) != rows or min(splits) < 0:
        raise ValueError(
            f"{api}: {what}_split_sizes {list(splits)} do not add up to {what}'s {rows} rows, one "
            f"number for each of {size} ranks"
        )
    return list(tensor.split(list(splits)))
