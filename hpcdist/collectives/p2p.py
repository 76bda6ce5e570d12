"""Point-to-point operations: from one rank to another."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar, cast

from hpcdist._engine import Operation, Work, checks_operations, entry, reads_natively
from hpcdist.backends.dispatch import batch
from hpcdist.groups.resolve import resolve
from hpcdist.groups.state import ProcessGroup
from hpcdist.groups.state import world as _world
from hpcdist.groups.world import NonMember, warn_outside
from hpcdist.typing import TensorLike

_Function = TypeVar("_Function", bound=Callable[..., Any])


def _native(function: _Function) -> _Function:
    """Put native code before a function: it does the usual calls itself."""
    return cast(_Function, entry(function, _world, ProcessGroup))


@_native
def isend(
    tensor: TensorLike,
    dst: int | None = None,
    group: ProcessGroup | None = None,
    tag: int = 0,
    group_dst: int | None = None,
) -> Work:
    """Begin to send a tensor to one rank.

    That rank must receive it. :func:`send_object_list` uses the tag 1022.

    Parameters
    ----------
    tensor : torch.Tensor, numpy.ndarray or buffer
        What to send; must not be changed until the handle is done.
    dst : int, optional
        Destination, as a rank of the world; may be this process.
    group : ProcessGroup, optional
        None means the default group.
    tag : int
        Only a message sent and received with the same tag matches; 0 or more.
    group_dst : int, optional
        Destination, as a rank of the group; give one of the two.

    Returns
    -------
    Work or None
        The handle; None outside the group, with a warning. Type checkers see a Work.

    Raises
    ------
    ValueError
        If the destination is not in the group, or given twice or not at all; if the tensor is not
        C-contiguous, or the tag is out of range.
    TypeError
        If the tensor is of a type that cannot be sent.

    Notes
    -----
    Source: ``torch.distributed.isend``.
    """
    asked = resolve(group)
    return asked.carrier.isend(tensor, asked.members.place(dst, group_dst, "dst"), tag)


@_native
def irecv(
    tensor: TensorLike,
    src: int | None = None,
    group: ProcessGroup | None = None,
    tag: int = 0,
    group_src: int | None = None,
) -> Work:
    """Begin to receive a tensor from one rank, or from any.

    That rank must send it.

    Parameters
    ----------
    tensor : torch.Tensor, numpy.ndarray or buffer
        Destination, of the size and dtype that is sent; must not be touched until the handle is
        done.
    src : int, optional
        Source, as a rank of the world; may be this process. Without `src` and `group_src`, any
        rank: the handle's ``source_rank()`` returns the sender, as a rank of the group.
    group, tag
        As for :func:`isend`.
    group_src : int, optional
        Source, as a rank of the group; give at most one of the two.

    Returns
    -------
    Work or None
        The handle; None outside the group, with a warning. Type checkers see a Work.

    Raises
    ------
    ValueError
        If the source is not in the group, or given twice; if the tensor is not C-contiguous, or
        the tag is out of range.
    TypeError
        If the tensor is of a type that cannot be received.

    Notes
    -----
    Source: ``torch.distributed.irecv``.
    """
    asked, place = resolve(group), -1
    if src is not None or group_src is not None:
        place = asked.members.place(src, group_src, "src")
    return asked.carrier.irecv(tensor, place, tag)


@_native
def send(
    tensor: TensorLike,
    dst: int | None = None,
    group: ProcessGroup | None = None,
    tag: int = 0,
    group_dst: int | None = None,
) -> None:
    """Send a tensor to one rank, and wait until it may be changed.

    That rank must receive it. A long send waits until the receive is posted: two ranks that both
    send first wait for each other. Use :func:`batch_isend_irecv` for exchanges.

    Parameters
    ----------
    tensor : torch.Tensor, numpy.ndarray or buffer
        What to send.
    dst : int, optional
        Destination, as a rank of the world; not this process.
    group, tag, group_dst
        As for :func:`isend`.

    Raises
    ------
    ValueError
        If the destination is this process or not in the group, or given twice or not at all; if the
        tensor is not C-contiguous, or the tag is out of range.
    TypeError
        If the tensor is of a type that cannot be sent.
    DistTimeoutError
        If the destination does not receive within the group's timeout.

    Notes
    -----
    Source: ``torch.distributed.send``.
    """
    asked = resolve(group)
    comm = asked.carrier
    comm.send(
        tensor,
        asked.members.peer(comm.rank, dst, group_dst, "dst", "Use isend, or copy the tensor."),
        tag,
    )


@_native
def recv(
    tensor: TensorLike,
    src: int | None = None,
    group: ProcessGroup | None = None,
    tag: int = 0,
    group_src: int | None = None,
) -> int:
    """Receive a tensor from one rank, or from any, and wait for it.

    That rank must send it.

    Parameters
    ----------
    tensor : torch.Tensor, numpy.ndarray or buffer
        Destination, of the size and dtype that is sent.
    src : int, optional
        Source, as a rank of the world; not this process. Without `src` and `group_src`, any rank.
    group, tag, group_src
        As for :func:`irecv`.

    Returns
    -------
    int
        The sender, as a rank of the world; -1 outside the group, with a warning.

    Raises
    ------
    ValueError
        If the source is this process or not in the group, or given twice; if the tensor is not
        C-contiguous, or the tag is out of range.
    TypeError
        If the tensor is of a type that cannot be received.
    DistMismatchError
        If the message is of another size or dtype than the tensor.
    DistTimeoutError
        If nothing arrives within the group's timeout.

    Notes
    -----
    Source: ``torch.distributed.recv``.
    """
    asked, place = resolve(group), -1
    comm = asked.carrier
    if src is not None or group_src is not None:
        place = asked.members.peer(
            comm.rank, src, group_src, "src", "Use irecv, or copy the tensor."
        )
    sender = comm.recv(tensor, place, tag)
    return asked.members.ranks[sender] if sender >= 0 else -1


@checks_operations
def _checked(
    op: Callable[..., Any],
    tensor: TensorLike,
    peer: int | None = None,
    group: ProcessGroup | None = None,
    tag: int = 0,
    group_peer: int | None = None,
) -> tuple[ProcessGroup | NonMember, int, int]:
    """Check a P2POp; return its group, and its peer as a rank of the world and of the group."""
    if op is not isend and op is not irecv:
        raise ValueError(f"op must be hpcdist.isend or hpcdist.irecv, not {op!r}")
    # the native call checks more; this check rejects a bad batch before any of it is sent
    if tensor is None or isinstance(tensor, (list, tuple, dict, str, int, float, complex)):
        raise TypeError(f"tensor must be a tensor or an array, not {type(tensor).__name__}")
    pg = resolve(group)
    place = pg.members.place(peer, group_peer, "peer")
    return pg, pg.members.ranks[place] if place >= 0 else -1, place


@reads_natively
class P2POp(Operation):
    """One send or receive of a batch, for :func:`batch_isend_irecv`.

    Parameters
    ----------
    op : callable
        :func:`isend` or :func:`irecv`.
    tensor : torch.Tensor, numpy.ndarray or buffer
        What to send, or the destination.
    peer : int, optional
        The other rank, as a rank of the world.
    group, tag
        As for :func:`isend`.
    group_peer : int, optional
        The other rank, as a rank of the group; give one of the two.

    Attributes
    ----------
    op, tensor, group, tag
        As given; the group is never None. The tensor and the tag may be changed until the batch
        begins. In a derived class they may be properties; the batch reads op, tensor and tag once.
    peer, group_peer : int
        The other rank, as a rank of the world and of the group; -1 outside the group.

    Raises
    ------
    ValueError
        If `op` is neither, or the peer is not in the group, or given twice or not at all.
    TypeError
        If `tensor` is not a tensor.

    Notes
    -----
    Local to this process. Source: ``torch.distributed.P2POp``.
    """

    __slots__ = ()
    __signature__ = inspect.signature(_checked).replace(return_annotation=None)

    def __repr__(self) -> str:
        own, other = self.group.carrier.rank, self.group_peer
        source, target = (own, other) if self.op is isend else (other, own)
        what = self.tensor
        return (
            f"P2POp({self.op.__name__} group={self.group!r}, group_src={source}, "
            f"group_dst={target}, tag={self.tag}, {getattr(what, 'dtype', type(what).__name__)}"
            f"{list(getattr(what, 'shape', ()))})"
        )


@_native
def batch_isend_irecv(p2p_op_list: list[P2POp]) -> list[Work]:
    """Begin several sends and receives at once.

    The ranks named in the batch must have the matching operations; others need not call it. All
    receives are posted before the first send, so that the order in the list cannot deadlock.
    Between two ranks, messages of one tag match in the order of the lists.

    Parameters
    ----------
    p2p_op_list : list of P2POp
        The operations, all of the same group. May be empty.

    Returns
    -------
    list of Work
        The handles, in the order of the list; empty outside the group, with a warning.

    Raises
    ------
    ValueError
        If the list contains anything other than P2POp, or operations of different groups; if a
        tensor is not C-contiguous, or a tag is out of range; if a tensor that is received shares
        memory with another one of the batch. Nothing is sent or received then.
    TypeError
        If a tensor is of a type that cannot be sent.

    Notes
    -----
    Source: ``torch.distributed.batch_isend_irecv``.
    """
    if not isinstance(p2p_op_list, (list, tuple)) or not all(
        isinstance(each, P2POp) for each in p2p_op_list
    ):
        raise ValueError("Invalid ``p2p_op_list``: it must be a list of hpcdist.P2POp")
    if not p2p_op_list:
        return []
    pg = p2p_op_list[0].group
    for each in p2p_op_list:
        if each.group is not pg:
            raise ValueError(
                f"all operations of a batch must use one group: got {pg!r} and {each.group!r}"
            )
    if isinstance(pg, NonMember):
        for each in p2p_op_list:
            warn_outside(each.op.__name__, 3)
        return []
    operations = []
    for each in p2p_op_list:  # a derived class may have properties: each is read once
        op = each.op
        if op is not isend and op is not irecv:
            raise ValueError(f"op must be hpcdist.isend or hpcdist.irecv, not {op!r}")
        operations.append((op is isend, each.tensor, each.group_peer, each.tag))
    return batch(pg.carrier, operations)
