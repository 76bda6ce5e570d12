"""Types of arguments: what is a tensor, and what says how to reduce; for annotations only."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

if TYPE_CHECKING:
    from torch import distributed

    from hpcdist._ops import ReduceOp


class SupportsBuffer(Protocol):
    """What has Python's buffer protocol: a NumPy array, a bytearray, an array of numbers."""

    def __buffer__(self, flags: int, /) -> memoryview: ...


class SupportsDLPack(Protocol):
    """What has DLPack: a torch.Tensor, and the arrays of other libraries."""

    def __dlpack__(self, *, stream: Any = ...) -> Any: ...
    def __dlpack_device__(self) -> tuple[Any, Any]: ...


#: What the operations read and write where it lies.
TensorLike: TypeAlias = SupportsBuffer | SupportsDLPack

#: Several of them.
Tensors: TypeAlias = Iterable[TensorLike]

#: How tensors are reduced, in hpcdist's words or torch's.
Op: TypeAlias = "ReduceOp | distributed.ReduceOp | distributed.ReduceOp.RedOpType"

#: The values of `async_op`, for overloads.
Sync: TypeAlias = Literal[False]
Async: TypeAlias = Literal[True]
