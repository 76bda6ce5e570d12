"""Blocks that go from rank to rank, each pair of ranks with a size of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hpcdist._engine import Comm
from hpcdist.errors import DistMismatchError

from . import direct
from .core import Core, Plan
from .device_tensor import DeviceTensor
from .pinned import Copy, Piece


@dataclass(frozen=True)
class Exchange:
    """One operation that sends a block to some ranks, and takes one from some.

    Attributes
    ----------
    api : str
        Public name of the operation.
    call : callable
        Moves one piece: takes the communicator, and lists of what is sent and received.
    ins, outs : list of DeviceTensor
        The blocks, by rank where there is one for each rank.
    tensors : list
        All tensors of the call, to be kept alive.
    written : list
        Those that it writes.
    about : str
        What else a message about it says.
    sends, takes : list of (DeviceTensor or None), optional
        Blocks for each rank, and from it, where they are not `ins` and `outs`; None for no block.
    """

    api: str
    call: Callable[[Comm, list[Any], list[Any]], None]
    ins: list[DeviceTensor]
    outs: list[DeviceTensor]
    tensors: list[Any]
    written: list[Any]
    about: str = ""
    sends: list[DeviceTensor | None] | None = None
    takes: list[DeviceTensor | None] | None = None


def one_dtype(api: str, parts: Sequence[DeviceTensor]) -> None:
    """Refuse tensors of several dtypes."""
    if any(part.dtype is not parts[0].dtype for part in parts):
        names = sorted({part.dtype.name for part in parts})
        raise TypeError(f"{api}: the tensors must have one dtype, and have {', '.join(names)}")


def slices(blocks: Sequence[DeviceTensor], width: int, number: int) -> list[Copy]:
    """At most `width` bytes of each block, one behind the other in the buffer."""
    copies, at = [], 0
    for block in blocks:
        start = min(number * width, block.size)
        length = min(width, block.size - start)
        copies.append(Copy(block.bytes, start, length, at))
        at += length
    return copies


def views(buffer: Any, copies: Sequence[Copy], kind: Any) -> list[Any]:
    """The blocks of a buffer, as tensors of a dtype."""
    return [buffer[each.at : each.at + each.length].view(kind) for each in copies]


def rounds(longest: int, width: int) -> int:
    """How many times the buffer is filled for the longest block."""
    return max(-(-longest // width), 1)


class Exchanges(Core):
    """The part of a group that carries out exchanges."""

    def _exchange(self, exchange: Exchange, async_op: Any) -> Any:
        """Move the blocks piece by piece, once all pairs of ranks agree on their sizes."""
        ins, outs, call = exchange.ins, exchange.outs, exchange.call
        one_dtype(exchange.api, [*ins, *outs])
        kind = (ins or outs)[0].dtype
        sends = _extents(ins if exchange.sends is None else exchange.sends, self.size)
        takes = _extents(outs if exchange.takes is None else exchange.takes, self.size)

        def pieces(comm: Comm, size: int) -> list[Piece]:
            width = self._width(size)
            longest = self._compare(comm, exchange.api, sends, takes)
            return [
                one(comm, slices(ins, width, number), slices(outs, width, number))
                for number in range(rounds(longest, width))
            ]

        def one(comm: Comm, loads: list[Copy], stores: list[Copy]) -> Piece:
            def move(source: Any, target: Any) -> None:
                torch_kind = kind.torch_dtype
                call(comm, views(source, loads, torch_kind), views(target, stores, torch_kind))

            return Piece(loads, move, stores)

        index = self._device(exchange.api, [*ins, *outs])
        about = ", ".join(filter(None, (kind.name, exchange.about)))
        plan = Plan(pieces, True, direct.exchange(call, ins, outs))
        tensors, written = exchange.tensors, exchange.written
        return self._run(exchange.api, about, index, tensors, written, plan, async_op)

    def _compare(self, comm: Comm, api: str, sends: Any, takes: Any) -> int:
        """Let each pair of ranks compare its blocks, before data move; bytes of the longest."""
        coming = np.empty_like(takes)
        comm.all_to_all_single(coming, sends)
        wrong = np.flatnonzero((coming != takes).any(axis=1))
        own = np.array([max(sends[:, 0].max(), takes[:, 0].max()), len(wrong)], np.int64)
        table = np.empty((self.size, 2), np.int64)
        comm.all_gather_into_tensor(table.reshape(-1), own, api=f"{api}: sizes")
        if table[:, 1].any():
            ranks = ", ".join(map(str, np.flatnonzero(table[:, 1])))
            here = "".join(_difference(rank, coming[rank], takes[rank]) for rank in wrong[:4])
            raise DistMismatchError(
                f"{api} of CUDA tensors in group {self.name!r}: what is sent to rank {ranks} does "
                f"not fit there{here} (this is rank {self.rank}); nothing has been changed"
            )
        return int(table[:, 0].max())

    def _width(self, size: int) -> int:
        """Bytes of each rank's block that a buffer takes; whole elements of every type."""
        return max(size // self.size // 16 * 16, 16)


def _extents(blocks: Sequence[DeviceTensor | None], size: int) -> Any:
    """Bytes and order of the block of each rank, as rows of an array."""
    rows = np.zeros((size, 2), np.int64)
    for row, block in zip(rows, blocks, strict=False):  # no blocks: those of other ranks' call
        if block is not None:
            row[:] = block.size, block.order
    return rows


def _difference(rank: int, coming: Any, wanted: Any) -> str:
    if coming[0] == wanted[0]:
        return (
            f"; rank {rank} sends its elements in another order of dimensions (strides) than this "
            "rank's tensor has, and nothing is copied silently: pass contiguous tensors"
        )
    return f"; rank {rank} sends {coming[0]} bytes to this rank, which takes {wanted[0]}"
