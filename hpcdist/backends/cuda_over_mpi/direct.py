"""Operations by an MPI that takes device memory: it is given the tensors themselves.

Only what MPI does alone goes this way: its own reductions of its own types, in blocking calls
(nonblocking ones of device memory crash in some libraries), and moves that need no copy by the
processor. Everything else passes through the pinned buffers.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

from hpcdist._engine import Comm
from hpcdist._ops import ReduceOp
from hpcdist.backends import cuda

from .device_tensor import DeviceTensor

_INTEGERS = {"PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"}
#: What MPI itself reduces as hpcdist promises it; for the rest hpcdist brings its own functions,
#: which run on the processor.
_NATIVE = {
    **dict.fromkeys(("float32", "float64"), {"SUM", "PRODUCT", "AVG"}),
    **dict.fromkeys(("complex64", "complex128"), {"SUM", "AVG"}),
    **dict.fromkeys(("int32", "int64", "uint32", "uint64"), {"SUM", *_INTEGERS}),
    **dict.fromkeys(("int8", "uint8", "int16", "uint16"), _INTEGERS),
}


def memory(part: DeviceTensor) -> Any:
    """A tensor that says it is on the host, at the tensor's address. Only MPI may look into it."""
    import torch

    kind = part.dtype.torch_dtype
    if not part.size:
        return torch.empty(0, dtype=kind)
    at: Any = (ctypes.c_char * part.size).from_address(part.address)
    return torch.frombuffer(at, dtype=torch.uint8).view(kind)


def _op(op: ReduceOp) -> ReduceOp:
    return ReduceOp.SUM if op.name == "AVG" else op


def _after(parts: Sequence[DeviceTensor], op: ReduceOp, size: int) -> Any:
    """The mean is the sum, divided on the device; the event tells when."""
    if op.name != "AVG" or size == 1:
        return None
    runtime = cuda.runtime()
    stream = runtime.current(parts[0].device)
    for part in parts:
        runtime.divide(stream, part.bytes.view(part.dtype.torch_dtype), size)
    return runtime.record(stream)


def _does(op: ReduceOp, part: DeviceTensor) -> bool:
    return op.name in _NATIVE.get(part.dtype.name, ())


def all_reduce(
    parts: Sequence[DeviceTensor], op: ReduceOp, size: int
) -> Callable[[Comm], Any] | None:
    """One blocking call for each tensor."""
    if not _does(op, parts[0]):
        return None

    def call(comm: Comm) -> Any:
        for part in parts:
            comm.all_reduce(memory(part), _op(op), api="all_reduce (cuda)")
        return _after(parts, op, size)

    return call


def reduce(part: DeviceTensor, root: int, op: ReduceOp, size: int) -> Callable[[Comm], Any] | None:
    """One blocking call; the root's tensor is divided for a mean."""
    if not _does(op, part):
        return None

    def call(comm: Comm) -> Any:
        comm.reduce(memory(part), root, _op(op))
        return _after([part], op, size) if comm.rank == root else None

    return call


def reduce_scatter(
    out: DeviceTensor,
    ins: Sequence[DeviceTensor],
    whole: DeviceTensor | None,
    op: ReduceOp,
    size: int,
) -> Callable[[Comm], Any] | None:
    """One blocking call for a tensor of moderate size, else one for each block.

    No input may lie in the output.
    """
    if not _does(op, out):
        return None

    def call(comm: Comm) -> Any:
        if whole is not None:
            comm.reduce_scatter_tensor(memory(out), memory(whole), _op(op))
        else:
            comm.reduce_scatter(memory(out), [memory(part) for part in ins], _op(op))
        return _after([out], op, size)

    return call


def broadcast(part: DeviceTensor, root: int) -> Callable[[Comm], Any]:
    """Bytes, whatever they are."""

    def call(comm: Comm) -> Any:
        comm.broadcast(memory(part), root, api="broadcast (cuda)")

    return call


def all_gather(out: DeviceTensor, own: DeviceTensor) -> Callable[[Comm], Any]:
    """Bytes, whatever they are."""

    def call(comm: Comm) -> Any:
        comm.all_gather_into_tensor(memory(out), memory(own), api="all_gather_into_tensor (cuda)")

    return call


def all_gather_lists(
    outs: Sequence[Sequence[DeviceTensor]], owns: Sequence[DeviceTensor]
) -> Callable[[Comm], Any]:
    """For each tensor, messages between all ranks."""

    def call(comm: Comm) -> Any:
        for own, blocks in zip(owns, outs, strict=True):
            comm.all_gather([memory(each) for each in blocks], memory(own), api="all_gather (cuda)")

    return call


def exchange(
    call: Callable[[Comm, list[Any], list[Any]], Any],
    ins: Sequence[DeviceTensor],
    outs: Sequence[DeviceTensor],
) -> Callable[[Comm], Any]:
    """Gathering, scattering, exchanging: MPI compares what the ranks send and receive."""

    def run(comm: Comm) -> Any:
        call(comm, [memory(part) for part in ins], [memory(part) for part in outs])

    return run
