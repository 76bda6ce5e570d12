"""Messages between two GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hpcdist import _nccl
from hpcdist._nccl import Communicator, StreamQueue
from hpcdist.backends.overlaps import refuse_overlap

from .tensors import message_region


def isend(queue: StreamQueue, tensor: Any, dst: int) -> Any:
    """Begin to send, on a communicator of the two ranks."""
    own = message_region(tensor, "isend: tensor", True)
    kind, lanes = _nccl.movement(own.dtype)

    def enqueue(comm: Communicator, stream: int) -> None:
        comm.send(own.address, own.elements * lanes, kind, _rank_in(comm, dst), stream)

    return queue.launch("isend", [own], [tensor], enqueue, True, peer=dst)


def irecv(queue: StreamQueue, tensor: Any, src: int) -> Any:
    """Begin to receive from one rank, on a communicator of the two ranks."""
    _refuse_any_source(src)
    own = message_region(tensor, "irecv: tensor", False)
    kind, lanes = _nccl.movement(own.dtype)

    def enqueue(comm: Communicator, stream: int) -> None:
        comm.recv(own.address, own.elements * lanes, kind, _rank_in(comm, src), stream)

    return queue.launch("irecv", [own], [tensor], enqueue, True, peer=src, source=src)


def _rank_in(comm: Communicator, peer: int) -> int:
    """Return the number of the other rank in the communicator of two, whose ranks are 0 and 1."""
    return 1 - comm.rank if comm.size == 2 else peer


def _refuse_any_source(src: int) -> None:
    if src < 0:
        raise ValueError(
            "NCCL cannot receive from any rank: name the source (src or group_src), or use a "
            "group over MPI"
        )


def look_at_batch(operations: Sequence[tuple[bool, Any, int, int]]) -> list[Any]:
    """Return the memory of a batch's tensors; raise if it cannot begin."""
    regions = [
        message_region(each, "batch_isend_irecv: tensor", sends) for sends, each, _, _ in operations
    ]
    for sends, _, peer, _ in operations:
        if not sends:
            _refuse_any_source(peer)
    refuse_overlap(operations, regions)
    return regions


def batch_isend_irecv(
    queue: StreamQueue, operations: Sequence[tuple[bool, Any, int, int]]
) -> list[Any]:
    """Begin messages together, on the communicator of all ranks.

    Parameters
    ----------
    queue : StreamQueue
        Of the group.
    operations : sequence of (bool, tensor, int, int)
        Whether it is sent, what, the other rank, and a tag, which NCCL does not have.

    Returns
    -------
    list
        One handle for each; they are done together.
    """
    regions = look_at_batch(operations)

    def enqueue(comm: Communicator, stream: int) -> None:
        with _nccl.Group(comm):
            for (sends, _, peer, _), each in zip(operations, regions, strict=True):
                kind, lanes = _nccl.movement(each.dtype)
                call = comm.send if sends else comm.recv
                call(each.address, each.elements * lanes, kind, peer, stream)

    tensors = [each[1] for each in operations]
    shown: tuple[list[Any], list[Any]] = (list(operations), [])
    work = queue.launch("batch_isend_irecv", regions, tensors, enqueue, True, shown=shown)
    return [work] * len(operations)
