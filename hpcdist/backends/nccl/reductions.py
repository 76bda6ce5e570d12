"""Reductions among GPUs that are several NCCL calls, or run on one rank only."""

from __future__ import annotations

from typing import Any

from hpcdist import _nccl
from hpcdist._nccl import Communicator, StreamQueue
from hpcdist._ops import ReduceOp
from hpcdist.backends.aliasing import refuse_input_in_output, refuse_overlap

from .tensors import check_count, check_form, common_dtype, region


def _translate(comm: Communicator, dtype: int, op: ReduceOp) -> tuple[int, int, int]:
    """Return NCCL's element type, its elements per element of ours, and its operation."""
    kind, lanes, how = _nccl.reduction(dtype, op.code)
    return kind, lanes, comm.premul_sum(op.factor, kind) if how < 0 else how


def all_reduce_coalesced(queue: StreamQueue, tensors: Any, op: Any, async_op: bool) -> Any:
    """Reduce several tensors in one call."""
    api, tensors, op = "all_reduce_coalesced", list(tensors), ReduceOp(op)
    regions = [region(each, f"{api}: tensor") for each in tensors]
    for each in regions:
        _nccl.reduction(each.dtype, op.code)
    refuse_overlap(regions, "tensors")

    def enqueue(comm: Communicator, stream: int) -> None:
        with _nccl.Group(comm):
            for each in regions:
                kind, lanes, how = _translate(comm, each.dtype, op)
                at = each.address
                comm.all_reduce(at, at, each.elements * lanes, kind, how, stream)

    facts = (op, [each.form for each in regions])
    return queue.launch(api, regions, tensors, enqueue, async_op, facts=facts)


def reduce(queue: StreamQueue, tensor: Any, root: int, op: Any, async_op: bool) -> Any:
    """Reduce over all ranks, onto root."""
    op = ReduceOp(op)
    own = region(tensor, "reduce: tensor")
    _nccl.reduction(own.dtype, op.code)

    def enqueue(comm: Communicator, stream: int) -> None:
        kind, lanes, how = _translate(comm, own.dtype, op)
        comm.reduce(own.address, own.address, own.elements * lanes, kind, how, root, stream)

    facts = (op, own.elements, own.form, root)
    return queue.launch("reduce", [own], [tensor], enqueue, async_op, facts=facts)


def reduce_scatter(
    queue: StreamQueue, output: Any, input_list: Any, op: Any, async_op: bool
) -> Any:
    """Reduce a list element by element; rank i keeps element i."""
    api, op, inputs, rank = "reduce_scatter", ReduceOp(op), list(input_list), queue.rank
    check_count(api, len(inputs), queue.size, "input_list")
    out = region(output, f"{api}: output")
    ins = [region(each, f"{api}: input", False) for each in inputs]
    dtype = common_dtype(api, [out, *ins], "output and inputs")
    check_count(api, out.elements, ins[rank].elements, "output")
    check_form(api, out, ins[rank], "output and this rank's input")
    refuse_input_in_output(ins, [out], {rank: 0}, "input_list", "output")
    _nccl.reduction(dtype, op.code)

    def enqueue(comm: Communicator, stream: int) -> None:
        kind, lanes, how = _translate(comm, dtype, op)
        with _nccl.Group(comm):
            for root, each in enumerate(ins):
                to = out.address if root == rank else each.address
                n = each.elements * lanes
                comm.reduce(each.address, to, n, kind, how, root, stream)

    facts = (op, [each.form for each in ins])
    return queue.launch(
        api,
        [*ins, out],
        [output, *inputs],
        enqueue,
        async_op,
        facts=facts,
        shown=([inputs], [output]),
        reads=len(ins),
    )
