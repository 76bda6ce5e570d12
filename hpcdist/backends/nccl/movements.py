"""Collectives among GPUs that move tensors, made of broadcasts, or of sends and receives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hpcdist import _nccl
from hpcdist._nccl import Communicator, StreamQueue
from hpcdist.backends.aliasing import refuse_input_in_output, refuse_overlap

from .tensors import (
    check_contiguous,
    check_count,
    check_form,
    common_dtype,
    region,
    split_rows,
)


def all_gather_coalesced(
    queue: StreamQueue, output_lists: Any, input_list: Any, async_op: bool
) -> Any:
    """Collect several tensors of each rank in one call."""
    lists, inputs = [list(each) for each in output_lists], list(input_list)
    check_count("all_gather_coalesced", len(lists), queue.size, "output_tensor_lists")
    turned = [[each[place] for each in lists] for place in range(len(inputs))]
    return gather_all(queue, "all_gather_coalesced", turned, inputs, async_op)


def gather_all(
    queue: StreamQueue, api: str, lists: list[list[Any]], inputs: list[Any], async_op: bool
) -> Any:
    """Collect tensors of each rank on all ranks.

    Each rank's tensor is broadcast to its place; NCCL fuses what starts together.
    """
    rank, size = queue.rank, queue.size
    owns = [region(each, f"{api}: input", False) for each in inputs]
    outs = []
    for outputs, own in zip(lists, owns, strict=True):
        check_count(api, len(outputs), size, "the list of outputs")
        found = [region(each, f"{api}: output") for each in outputs]
        common_dtype(api, [own, *found], "outputs and input")
        check_count(api, found[rank].elements, own.elements, "this rank's output")
        check_form(api, own, found[rank], "input and this rank's output")
        outs.append(found)
    written = [out for found in outs for out in found]
    refuse_overlap(written, "output")
    own_place = {place: place * size + rank for place in range(len(owns))}
    refuse_input_in_output(owns, written, own_place, "input", "output")

    def enqueue(comm: Communicator, stream: int) -> None:
        with _nccl.Group(comm):
            for own, found in zip(owns, outs, strict=True):
                kind, lanes = _nccl.movement(own.dtype)
                for root, out in enumerate(found):
                    source = own.address if root == rank else out.address
                    n = out.elements * lanes
                    comm.broadcast(source, out.address, n, kind, root, stream)

    tensors = [*inputs, *(each for outputs in lists for each in outputs)]
    facts = ([[out.form for out in found] for found in outs],)
    shown = (list(inputs), lists)
    regions, reads = [*owns, *written], len(owns)
    return queue.launch(
        api, regions, tensors, enqueue, async_op, facts=facts, shown=shown, reads=reads
    )


def all_to_all(queue: StreamQueue, outputs: Any, inputs: Any, async_op: bool) -> Any:
    """Send the i-th input to rank i, receive the i-th output from it."""
    outs, ins = list(outputs), list(inputs)
    check_count("all_to_all", len(outs), queue.size, "output_tensor_list")
    check_count("all_to_all", len(ins), queue.size, "input_tensor_list")
    everyone, own = range(queue.size), {queue.rank: queue.rank}
    return exchange(queue, "all_to_all", ins, everyone, outs, everyone, own, async_op)


def all_to_all_single(
    queue: StreamQueue,
    output: Any,
    input: Any,
    output_splits: Any,
    input_splits: Any,
    async_op: bool,
) -> Any:
    """Exchange parts of one tensor, split along dimension 0."""
    api, size = "all_to_all_single", queue.size
    out = region(output, f"{api}: output")
    own = region(input, f"{api}: input", False)
    dtype = common_dtype(api, [out, own], "output and input")
    check_contiguous(api, out, "output")
    check_contiguous(api, own, "input")
    if output_splits or input_splits:
        outs = split_rows(api, output, output_splits, size, "output")
        ins = split_rows(api, input, input_splits, size, "input")
        rank = queue.rank
        check_count(api, outs[rank].numel(), ins[rank].numel(), "this rank's own output")
        return exchange(queue, api, ins, range(size), outs, range(size), {}, async_op)
    check_count(api, out.elements, own.elements, "output")
    if own.elements % size:
        raise ValueError(f"{api}: {own.elements} elements do not divide by {size} ranks")
    refuse_input_in_output([own], [out], {}, "input", "output")
    kind, lanes = _nccl.movement(dtype)
    n = own.elements // size * lanes

    def enqueue(comm: Communicator, stream: int) -> None:
        comm.all_to_all(own.address, out.address, n, kind, stream)

    facts, shown = (dtype,), ([input], [output])
    return queue.launch(
        api, [own, out], [output, input], enqueue, async_op, facts=facts, shown=shown, reads=1
    )


def exchange(
    queue: StreamQueue,
    api: str,
    sent: Sequence[Any],
    to: Sequence[int],
    received: Sequence[Any],
    sources: Sequence[int],
    own: dict[int, int],
    async_op: bool,
    root: int = -1,
) -> Any:
    """Start sends and receives together; `own`: the place of what this rank gives itself."""
    ins = [region(each, f"{api}: what is sent", False) for each in sent]
    outs = [region(each, f"{api}: what is received") for each in received]
    dtype = common_dtype(api, [*ins, *outs], "the tensors")
    refuse_overlap(outs, "output")
    refuse_input_in_output(ins, outs, own, "input", "output")
    for gives, takes in own.items():
        if gives < len(ins) and takes < len(outs):
            check_count(api, outs[takes].elements, ins[gives].elements, "this rank's own output")
            check_form(api, ins[gives], outs[takes], "this rank's own input and output")
    kind, lanes = _nccl.movement(dtype)

    def enqueue(comm: Communicator, stream: int) -> None:
        with _nccl.Group(comm):
            for peer, each in zip(to, ins, strict=True):
                if each.elements:
                    comm.send(each.address, each.elements * lanes, kind, peer, stream)
            for peer, each in zip(sources, outs, strict=True):
                if each.elements:
                    comm.recv(each.address, each.elements * lanes, kind, peer, stream)

    tensors, shown = [*sent, *received], (list(sent), list(received))
    if api == "all_to_all_single":
        shown = ([list(sent)], [list(received)])  # it was one tensor
    regions, reads = [*ins, *outs], len(ins)
    return queue.launch(
        api, regions, tensors, enqueue, async_op, facts=(dtype, root), shown=shown, reads=reads
    )
