"""Operations in which each element stays in its place: reductions, and broadcast."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hpcdist._engine import Comm
from hpcdist.backends.aliasing import refuse_overlap

from . import direct
from .core import Core, Plan
from .device_tensor import DeviceTensor, describe, reducible, with_extra
from .pinned import Copy, Piece


def cut(parts: Sequence[DeviceTensor], size: int) -> list[list[Copy]]:
    """Divide tensors into buffers full, several short ones into one; at least one, if empty."""
    full: list[list[Copy]] = [[]]
    room = size
    for part in parts:
        start = 0
        while start < part.size:
            if not room:
                full.append([])
                room = size
            length = min(room, part.size - start)
            full[-1].append(Copy(part.bytes, start, length, size - room))
            start += length
            room -= length
    return full


class InPlace(Core):
    """The part of a group that reduces in place and broadcasts."""

    def all_reduce(self, tensor: Any, op: Any, async_op: bool = False, **about: Any) -> Any:
        api = about.get("api") or "all_reduce"
        return self._reduce_all(api, [tensor], op, async_op, about.get("extra", 0))

    def all_reduce_coalesced(self, tensors: Any, op: Any, async_op: bool = False) -> Any:
        tensors = list(tensors)
        if not tensors:
            raise ValueError("tensors is empty")
        return self._reduce_all("all_reduce_coalesced", tensors, op, async_op)

    def _reduce_all(
        self, api: str, tensors: list[Any], op: Any, async_op: Any, extra: int = 0
    ) -> Any:
        parts = [DeviceTensor.inspect(each, "tensor") for each in tensors]
        kind = parts[0].dtype
        if any(part.dtype is not kind for part in parts):
            raise TypeError(f"{api}: the tensors must have one dtype")
        op = reducible(op, parts[0])
        refuse_overlap(parts, "tensors")

        def move(comm: Comm, data: Any) -> None:
            comm.all_reduce(data, op, api=f"{api} (cuda)")

        about = with_extra(f"{describe(parts)}, {op!r}", extra)
        straight = direct.all_reduce(parts, op, self.size)
        return self._elementwise(api, about, parts, tensors, move, straight, async_op)

    def reduce(self, tensor: Any, root: int, op: Any, async_op: bool = False, **about: Any) -> Any:
        mine = self.rank == root
        part = DeviceTensor.inspect(tensor, "tensor", mine)
        op = reducible(op, part)
        return self._elementwise(
            "reduce",
            f"{part}, {op!r}, root {root}",
            [part],
            [tensor],
            lambda comm, data: comm.reduce(data, root, op),
            direct.reduce(part, root, op, self.size),
            async_op,
            stores=mine,
        )

    def broadcast(self, tensor: Any, root: int, async_op: bool = False, **about: Any) -> Any:
        mine = self.rank == root
        part = DeviceTensor.inspect(tensor, "tensor", not mine)
        api = about.get("api") or "broadcast"
        return self._elementwise(
            api,
            with_extra(f"{part}, root {root}", about.get("extra")),
            [part],
            [tensor],
            lambda comm, data: comm.broadcast(data, root, api=f"{api} (cuda)"),
            direct.broadcast(part, root),
            async_op,
            loads=mine,
            stores=not mine,
        )

    def _elementwise(
        self,
        api: str,
        about: str,
        parts: list[DeviceTensor],
        tensors: list[Any],
        move: Callable[[Comm, Any], Any],
        straight: Callable[[Comm], Any] | None,
        async_op: Any,
        loads: bool = True,
        stores: bool = True,
    ) -> Any:
        kind = parts[0].dtype.torch_dtype

        def pieces(comm: Comm, size: int) -> list[Piece]:
            return [one(comm, copies) for copies in cut(parts, size)]

        def one(comm: Comm, copies: list[Copy]) -> Piece:
            length = sum(each.length for each in copies)

            def call(buffer: Any, _: Any) -> None:
                move(comm, buffer[:length].view(kind))

            return Piece(copies if loads else (), call, copies if stores else ())

        plan = Plan(pieces, direct=straight)
        index = self._device(api, parts)
        return self._run(api, about, index, tensors, tensors, plan, async_op)
