"""Operations by an MPI that takes device memory: it is given the tensors themselves.

Only what MPI does alone goes this way: its own reductions of its own types, in blocking calls
(nonblocking ones of device memory crash in some libraries), and moves that need no copy by the
processor. Everything else passes through the ring all the same.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hpcdist._engine import Comm
from hpcdist._ops import ReduceOp
from hpcdist.backends.nccl import device

from .parts import Part

__all__ = ["all_gather", "all_reduce", "broadcast", "reduce"]

_INTEGERS = {"PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"}
#: What MPI itself reduces as hpcdist promises it; for the rest hpcdist brings its own functions,
#: which run on the processor.
_NATIVE = {
    **dict.fromkeys(("float32", "float64"), {"SUM", "PRODUCT", "AVG"}),
    **dict.fromkeys(("complex64", "complex128"), {"SUM", "AVG"}),
    **dict.fromkeys(("int32", "int64", "uint32", "uint64"), {"SUM", *_INTEGERS}),
    **dict.fromkeys(("int8", "uint8", "int16", "uint16"), _INTEGERS),
}


def _memory(part: Part, kind: str = "") -> Any:
    """An array that lies where the tensor lies. Nothing but MPI may look into it."""
    if not part.size:
        return np.empty(0, kind or np.uint8)
    at: Any = (ctypes.c_char * part.size).from_address(part.address)
    return np.frombuffer(at, kind or np.uint8)


def _op(op: ReduceOp) -> ReduceOp:
    return ReduceOp.SUM if op.name == "AVG" else op


def _after(parts: Sequence[Part], op: ReduceOp, size: int) -> Any:
    """The mean is the sum, divided on the device; the event tells when."""
    if op.name != "AVG" or size == 1:
        return None
    runtime = device.runtime()
    stream = runtime.current(parts[0].device)
    for part in parts:
        runtime.divide(stream, part.bytes.view(part.dtype.torch_dtype), size)
    return runtime.record(stream)


def all_reduce(parts: Sequence[Part], op: ReduceOp, size: int) -> Callable[[Comm], Any] | None:
    """One blocking call for each tensor."""
    kind = parts[0].dtype.name
    if op.name not in _NATIVE.get(kind, ()):
        return None

    def call(comm: Comm) -> Any:
        for part in parts:
            comm.all_reduce(_memory(part, kind), _op(op), api="all_reduce (cuda)")
        return _after(parts, op, size)

    return call


def reduce(part: Part, root: int, op: ReduceOp, size: int) -> Callable[[Comm], Any] | None:
    """One blocking call; the root's tensor is divided for a mean."""
    kind = part.dtype.name
    if op.name not in _NATIVE.get(kind, ()):
        return None

    def call(comm: Comm) -> Any:
        comm.reduce(_memory(part, kind), root, _op(op))
        return _after([part], op, size) if comm.rank == root else None

    return call


def broadcast(part: Part, root: int) -> Callable[[Comm], Any]:
    """Bytes, whatever they are."""

    def call(comm: Comm) -> Any:
        comm.broadcast(_memory(part), root, api="broadcast (cuda)")

    return call


def all_gather(out: Part, own: Part) -> Callable[[Comm], Any]:
    """Bytes, whatever they are."""

    def call(comm: Comm) -> Any:
        comm.all_gather_into_tensor(_memory(out), _memory(own), api="all_gather_into_tensor (cuda)")

    return call
