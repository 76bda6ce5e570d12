"""Reductions among GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hpcdist import _nccl
from hpcdist._nccl import Communicator
from hpcdist._ops import ReduceOp
from hpcdist.backends.aliasing import refuse_input_in_output, refuse_overlap

from .launch import Launcher, Part, region

__all__ = ["Reductions", "fits", "same"]


def same(api: str, parts: Sequence[Part], what: str) -> int:
    """The one element type of some tensors."""
    kinds = {part.dtype for part in parts}
    if len(kinds) > 1:
        raise ValueError(f"{api}: {what} must have one dtype, and have {len(kinds)}")
    return next(iter(kinds), 1)


def fits(api: str, found: int, wanted: int, what: str) -> None:
    if found != wanted:
        raise ValueError(f"{api}: {what} has {found} elements, and needs {wanted}")


class Reductions(Launcher):
    """The part of a group over NCCL that reduces."""

    def _how(self, comm: Communicator, dtype: int, op: ReduceOp) -> tuple[int, int, int]:
        kind, lanes, how = _nccl.reduction(dtype, op.code)
        return kind, lanes, comm.premul_sum(op.factor, kind) if how < 0 else how

    def all_reduce_coalesced(self, tensors: Any, op: Any, async_op: bool = False) -> Any:
        """Reduce several tensors in one call."""
        api, tensors, op = "all_reduce_coalesced", list(tensors), ReduceOp(op)
        parts = [region(each, f"{api}: tensor") for each in tensors]
        for part in parts:
            _nccl.reduction(part.dtype, op.code)
        refuse_overlap(parts, "tensors")

        def enqueue(comm: Communicator, stream: int) -> None:
            with self.batch(comm):
                for part in parts:
                    kind, lanes, how = self._how(comm, part.dtype, op)
                    at = part.address
                    comm.all_reduce(at, at, part.elements * lanes, kind, how, stream)

        facts = (op, [(part.elements, part.dtype) for part in parts])
        return self.launch(api, parts, tensors, enqueue, async_op, facts=facts)

    def reduce(self, tensor: Any, root: int, op: Any, async_op: bool = False) -> Any:
        """Reduce over all ranks, onto root."""
        op = ReduceOp(op)
        part = region(tensor, "reduce: tensor")
        _nccl.reduction(part.dtype, op.code)

        def enqueue(comm: Communicator, stream: int) -> None:
            kind, lanes, how = self._how(comm, part.dtype, op)
            at = part.address
            comm.reduce(at, at, part.elements * lanes, kind, how, root, stream)

        facts = (op, part.elements, part.dtype, root)
        return self.launch("reduce", [part], [tensor], enqueue, async_op, facts=facts)

    def reduce_scatter(self, output: Any, input_list: Any, op: Any, async_op: bool = False) -> Any:
        """Reduce a list element by element; rank i keeps element i."""
        api, op, inputs = "reduce_scatter", ReduceOp(op), list(input_list)
        fits(api, len(inputs), self.size, "input_list")
        out = region(output, f"{api}: output")
        ins = [region(each, f"{api}: input", False) for each in inputs]
        dtype = same(api, [out, *ins], "output and inputs")
        fits(api, out.elements, ins[self.rank].elements, "output")
        refuse_input_in_output(ins, [out], {self.rank: 0}, "input_list", "output")
        _nccl.reduction(dtype, op.code)

        def enqueue(comm: Communicator, stream: int) -> None:
            kind, lanes, how = self._how(comm, dtype, op)
            with self.batch(comm):
                for root, part in enumerate(ins):
                    to = out.address if root == self.rank else part.address
                    n = part.elements * lanes
                    comm.reduce(part.address, to, n, kind, how, root, stream)

        facts = (op, dtype, [part.elements for part in ins])
        shown = ([inputs], [output])
        return self.launch(
            api, [out, *ins], [output, *inputs], enqueue, async_op, facts=facts, shown=shown
        )
