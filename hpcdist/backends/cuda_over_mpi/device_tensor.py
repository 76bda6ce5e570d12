"""Tensors on a device as bytes, and in words."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

from hpcdist import _nccl, dtypes
from hpcdist._ops import ReduceOp, op_refusal
from hpcdist.backends import cuda


def flat(tensor: Any) -> Any:
    """The bytes of a dense tensor in the order of its memory, as a view."""
    import torch

    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


class DeviceTensor(NamedTuple):
    """A tensor on the device: its bytes, and what they are."""

    bytes: Any
    elements: int
    dtype: dtypes.DType
    device: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    address: int

    @property
    def size(self) -> int:
        """Number of bytes."""
        return self.elements * self.dtype.itemsize

    @property
    def order(self) -> int:
        """Number of its elements' order in memory, the same on all ranks; 0 for C order."""
        if self.strides is None:
            return 0
        steps = [step for n, step in zip(self.shape, self.strides, strict=True) if n != 1]
        return zlib.crc32(repr(steps).encode()) + 1

    def __str__(self) -> str:
        order = "" if self.strides is None else f", strides {list(self.strides)}"
        return f"{self.dtype.name}{list(self.shape)}{order}"

    @classmethod
    def inspect(cls, tensor: Any, role: str, writable: bool = True) -> DeviceTensor:
        """Look at a tensor; whatever is wrong with it is an error here."""
        runtime = cuda.runtime()
        address, elements, code, index, _, _ = _nccl.region(
            tensor, writable, runtime.memory, runtime.name, role
        )
        plain = elements < 2 or tensor.is_contiguous()
        strides = None if plain else tuple(tensor.stride())
        dtype, shape = dtypes.lookup(code), tuple(tensor.shape)
        return cls(flat(tensor), elements, dtype, index, shape, strides, address)

    def contiguous(self, role: str) -> DeviceTensor:
        """Return this tensor, whose blocks are of different ranks; ValueError if it is strided."""
        if self.strides is not None:
            raise ValueError(
                f"{role} must be C-contiguous, because its blocks are; pass {role}.contiguous()"
            )
        return self


def reducible(op: Any, part: DeviceTensor) -> ReduceOp:
    """The operation, or TypeError where it does not take the element type."""
    op = ReduceOp(op)
    why = op_refusal(op, part.dtype.code)
    if why is not None:
        raise TypeError(f"{op!r} on {part.dtype.name}: {why}")
    return op


def describe(parts: Sequence[DeviceTensor]) -> str:
    """Return tensors in words, the same on all ranks that have the same tensors."""
    words = [str(part) for part in parts]
    if len(words) <= 4:
        return ", ".join(words)
    # a long list: its beginning for the eye, and what stands for all of it
    return f"{', '.join(words[:4])}, ... {len(words)}: {zlib.crc32(' '.join(words).encode()):08x}"


def with_extra(call: str, extra: int | None) -> str:
    """Return a call in words, with its `extra`, which the ranks compare too, if there is one."""
    return f"{call}, {extra}" if extra else call
