"""Tensors in memory that all ranks of a node map."""

from __future__ import annotations

import logging
import os
import weakref
from typing import TYPE_CHECKING, Any

from hpcdist import log
from hpcdist.backends.carrier import Carrier
from hpcdist.backends.dispatch import agreeing
from hpcdist.backends.refusal import refusing
from hpcdist.groups.resolve import carrier_of
from hpcdist.groups.state import ProcessGroup
from hpcdist.groups.state import world as _world
from hpcdist.groups.world import warn_outside

if TYPE_CHECKING:
    import torch

_log = log.get_logger("symmetric")

#: Communicators whose rank 0 has said why there is no such memory.
_told: weakref.WeakSet[Any] = weakref.WeakSet()


def _why(comm: Carrier, nbytes: int) -> str:
    """Why a group got no memory of that many bytes for each rank, as far as this rank can see."""
    if getattr(comm, "checks_through", "") != "shared memory":
        return "its ranks do not share one node, or do not agree through its memory"
    try:
        room = os.statvfs("/dev/shm")
        free, whole = room.f_bavail * room.f_frsize, room.f_blocks * room.f_frsize
    except OSError as error:
        return f"/dev/shm cannot be used ({error.strerror})"
    return (
        f"some rank could not map {comm.size} times {nbytes} bytes in /dev/shm, which has {free} "
        f"of {whole} bytes free"
    )


def _say(comm: Carrier, nbytes: int) -> None:
    """Log the reason once per group, on one rank."""
    if not nbytes or comm.size == 1 or comm.rank != 0:
        return
    level = logging.INFO if comm in _told else logging.WARNING
    _told.add(comm)
    _log.log(
        level,
        "group %r has no symmetric memory: %s. The tensor is in ordinary memory, on all ranks.",
        comm.name,
        _why(comm, nbytes),
    )


def empty(
    *size: Any,
    dtype: torch.dtype | None = None,
    device: Any = None,
    symmetric: bool = True,
    group: ProcessGroup | None = None,
) -> torch.Tensor:
    """Create an uninitialized tensor in memory that all ranks of the group map.

    All ranks of the group must call it, with the same number of bytes, unless `symmetric` is false.
    Where all their tensors are symmetric, :func:`all_reduce`, :func:`all_reduce_coalesced`,
    :func:`reduce_scatter_tensor` and :func:`all_gather_into_tensor` of the same group read the
    ranks' tensors (their inputs) where they lie, without copies. ``all_reduce`` gives the same bits
    as for other tensors. Views count as well.

    Parameters
    ----------
    *size : int or sequence of int
        Shape, as for :func:`torch.empty`.
    dtype : torch.dtype, optional
        None means torch's default.
    device : torch.device or str, optional
        ``"cpu"``: there is no such memory on other devices.
    symmetric : bool
        False: ordinary memory; then the call is local.
    group : ProcessGroup, optional
        The group whose operations profit. None means the default group.

    Returns
    -------
    torch.Tensor
        Contiguous, on the host. In ordinary memory on all ranks where the group has no shared one:
        its ranks are on several nodes, or ``/dev/shm`` has no room. Rank 0 logs the reason;
        :func:`is_symmetric` tells. Outside the group, with a warning, in ordinary memory too.

    Raises
    ------
    ValueError
        If the device is not the host.
    TypeError, RuntimeError
        As :func:`torch.empty`.
    DistMismatchError
        On all ranks, if their numbers of bytes differ, or some of them are in another operation.
    DistTimeoutError
        If a rank does not call in time.

    Notes
    -----
    The memory is allocated before the call returns, in large pages where ``/dev/shm`` is mounted
    with ``huge=advise``. The tensor owns it, also beyond the end of the group. Once the tensors of
    all ranks are gone, a later call uses it again. Nothing is left in ``/dev/shm`` however the job
    ends. A child of ``fork`` shares the memory with its parent.

    After an operation that failed while data moved (a timeout, Ctrl-C), its tensors are no longer
    symmetric. They keep their addresses.

    Source: hpcdist's own; ``torch.distributed._symmetric_memory.empty`` is torch's for GPUs.
    """
    return _make("empty", size, dtype, device, symmetric, group)


def _make(
    api: str,
    size: Any,
    dtype: torch.dtype | None,
    device: Any,
    symmetric: bool,
    group: ProcessGroup | None,
) -> torch.Tensor:
    import torch

    if not symmetric:
        return torch.empty(*size, dtype=dtype, device=device)
    comm = _world.comm if group is None else carrier_of(group)
    if comm.rank < 0:
        warn_outside(api, 4, "makes a tensor in ordinary memory")  # the caller's line
        return torch.empty(*size, dtype=dtype, device=device)
    with refusing(agreeing(comm), api):
        if device is not None and torch.device(device).type != "cpu":
            raise ValueError(f"symmetric memory is the host's, and not on {device}")
        like = torch.empty(*size, dtype=dtype, device="meta")
    block = agreeing(comm).share(like.nbytes, api=api)
    if block is None:
        _say(comm, like.nbytes)
        return torch.empty(like.shape, dtype=like.dtype, device="cpu")
    return torch.frombuffer(block, dtype=torch.uint8).view(like.dtype).view(like.shape)


def zeros(
    *size: Any,
    dtype: torch.dtype | None = None,
    device: Any = None,
    symmetric: bool = True,
    group: ProcessGroup | None = None,
) -> torch.Tensor:
    """Create a tensor of zeros in memory that all ranks of the group map.

    All ranks of the group must call it, unless `symmetric` is false.

    Parameters
    ----------
    *size, dtype, device, symmetric, group
        As for :func:`empty`.

    Returns
    -------
    torch.Tensor
        As :func:`empty`.

    Raises
    ------
    ValueError, TypeError, RuntimeError, DistError
        As :func:`empty`.

    Notes
    -----
    Source: hpcdist's own.
    """
    return _make("zeros", size, dtype, device, symmetric, group).zero_()


def full(
    size: Any,
    fill_value: Any,
    *,
    dtype: torch.dtype | None = None,
    device: Any = None,
    symmetric: bool = True,
    group: ProcessGroup | None = None,
) -> torch.Tensor:
    """Create a tensor of one value in memory that all ranks of the group map.

    All ranks of the group must call it, unless `symmetric` is false.

    Parameters
    ----------
    size : sequence of int
        Shape.
    fill_value : number
        The value; may differ between ranks. Without `dtype` it decides the type, as for
        :func:`torch.full`.
    dtype, device, symmetric, group
        As for :func:`empty`.

    Returns
    -------
    torch.Tensor
        As :func:`empty`.

    Raises
    ------
    ValueError, TypeError, RuntimeError, DistError
        As :func:`empty`.

    Notes
    -----
    Source: hpcdist's own.
    """
    import torch

    if dtype is None and not symmetric:
        dtype = torch.full((), fill_value).dtype
    elif dtype is None:
        comm = _world.comm if group is None else carrier_of(group)
        with refusing(agreeing(comm), "full"):
            dtype = torch.full((), fill_value).dtype
    return _make("full", (size,), dtype, device, symmetric, group).fill_(fill_value)


def is_symmetric(tensor: Any, group: ProcessGroup | None = None) -> bool:
    """Whether a tensor lies in memory that all ranks of the group map. Local to this process.

    Parameters
    ----------
    tensor : torch.Tensor or array
        Any; a view of a symmetric tensor is one.
    group : ProcessGroup, optional
        None means the default group.

    Returns
    -------
    bool
        False for tensors of other groups, and outside the group.

    Raises
    ------
    ValueError
        If the tensor is not dense or on another device, or the group was destroyed.
    TypeError
        If it is not a tensor, or has no memory.

    Notes
    -----
    Source: hpcdist's own.
    """
    comm = _world.comm if group is None else carrier_of(group)
    return comm.rank >= 0 and agreeing(comm).place(tensor) is not None
