"""Collectives and point to point for Python objects.

Objects travel as payloads of :mod:`hpcdist.codec`: nothing is executed on arrival, and pickle is
used only where ``pickle=True``, :class:`hpcdist.allow_pickle` or ``HPCDIST_ALLOW_PICKLE=1`` say so.

Each operation moves two messages: a short one with the sizes, then the payloads. A rank that cannot
send its object takes part all the same and sends the reason in its place (as a negative size), so
the others raise the same error at once instead of waiting for it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hpcdist import codec
from hpcdist._engine import op_range
from hpcdist.backends.dispatch import agreeing
from hpcdist.backends.refusal import refusing_parts
from hpcdist.collectives._parts import (
    Part,
    buffer,
    check_list,
    decode,
    gather_sizes,
    group_of,
    root_of,
)
from hpcdist.collectives.objects_p2p import recv_object_list, send_object_list
from hpcdist.errors import DistMismatchError
from hpcdist.groups.process_group import ProcessGroup

__all__ = [
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "recv_object_list",
    "scatter_object_list",
    "send_object_list",
]


def broadcast_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: ProcessGroup | None = None,
    device: Any = None,
    group_src: int | None = None,
    weights_only: bool = False,
    *,
    pickle: bool | None = None,
) -> None:
    """Copy the objects in one rank's list into every rank's list.

    All ranks of the group must call it, with lists of the same length.

    Parameters
    ----------
    object_list : list
        The objects on the source rank; on the others its items are replaced.
    src : int, optional
        World rank of the source; 0 when neither `src` nor `group_src` is given.
    group : ProcessGroup, optional
        None means the default group.
    device : torch.device or str, optional
        Accepted for compatibility with torch; objects always travel through host memory.
    group_src : int, optional
        Rank of the source in `group`, instead of `src`.
    weights_only : bool
        Refuse pickle in this call, also where it is allowed.
    pickle : bool, optional
        Whether pickle may be used for what the codec does not carry (give the same on all ranks).
        None: as :class:`hpcdist.allow_pickle` and ``HPCDIST_ALLOW_PICKLE`` say; by default, no.

    Raises
    ------
    TypeError, ValueError
        On all ranks, when the source holds something that the codec does not carry.
    CodecError
        On a rank that cannot read what came, for example a pickle that it does not allow.
    DistMismatchError
        On all ranks, when the lists differ in length.

    Notes
    -----
    Objects that appear more than once in the list arrive as one object. Outside the group it warns
    and does nothing. Source: ``torch.distributed.broadcast_object_list``.
    """
    api = "broadcast_object_list"
    if (pg := group_of(api, group)) is None:
        return
    pickle = False if weights_only else pickle
    comm = pg.carrier
    with op_range(api, pg.members.name), refusing_parts(agreeing(comm), api, 2):
        root = root_of(pg, src, group_src, "src")
        length = check_list(object_list, "object_list")
        part = Part(api, root)
        here = comm.rank == root
        if here:
            part.encode(list(object_list), pickle)
        header = np.array([part.size, length], np.int64)
        comm.broadcast(header, root, api=api, extra=length)
        size, root_length = header.tolist()
        data = part.data if here else np.empty(abs(size), np.uint8)
        comm.broadcast(data, root, api=api, extra=length)
    if size < 0:
        part.fail([data])
    if here:
        return
    if root_length != length:  # seen here only when the entry check is off
        raise DistMismatchError(
            f"{api}: rank {root} broadcasts {root_length} objects, rank {comm.rank} has a list of "
            f"{length}"
        )
    object_list[:] = decode(api, root, data, pickle)


def all_gather_object(
    object_list: list[Any],
    obj: Any,
    group: ProcessGroup | None = None,
    weights_only: bool = False,
    *,
    pickle: bool | None = None,
) -> None:
    """Collect one object of every rank on every rank.

    All ranks of the group must call it.

    Parameters
    ----------
    object_list : list
        Result: item ``i`` becomes the object of group rank ``i``. At least as long as the group is
        large, and as long on every rank.
    obj : object
        This rank's object; they may differ between ranks.
    group, weights_only, pickle
        As for :func:`broadcast_object_list`.

    Raises
    ------
    TypeError, ValueError
        On all ranks, naming the rank whose object the codec does not carry or whose list is short.
    CodecError
        On a rank that cannot read what came, for example a pickle that it does not allow.
    DistMismatchError
        On all ranks, when the lists differ in length.

    Notes
    -----
    Outside the group it warns and does nothing. Source: ``torch.distributed.all_gather_object``.
    """
    api = "all_gather_object"
    if (pg := group_of(api, group)) is None:
        return
    pickle = False if weights_only else pickle
    comm = pg.carrier
    with op_range(api, pg.members.name), refusing_parts(agreeing(comm), api, 2):
        length = check_list(object_list, "object_list")
        part = Part(api, comm.rank)
        if length < comm.size:
            part.refuse(
                ValueError(f"object_list has {length} items for the {comm.size} ranks of the group")
            )
        part.encode(obj, pickle)
        sizes = gather_sizes(comm, part, length)
        payloads = [np.empty(size, np.uint8) for size in sizes]
        comm.all_gather(payloads, part.data, api=api)
    # first all, then the list: an error leaves it as it was
    object_list[: comm.size] = [decode(api, i, data, pickle) for i, data in enumerate(payloads)]


def gather_object(
    obj: Any,
    object_gather_list: list[Any] | None = None,
    dst: int | None = None,
    group: ProcessGroup | None = None,
    group_dst: int | None = None,
    weights_only: bool = False,
    *,
    pickle: bool | None = None,
) -> None:
    """Collect one object of every rank on one rank.

    All ranks of the group must call it.

    Parameters
    ----------
    obj : object
        This rank's object.
    object_gather_list : list, optional
        Result on the destination, at least as long as the group is large: item ``i`` becomes the
        object of group rank ``i``. None on the other ranks.
    dst : int, optional
        World rank of the destination; 0 when neither `dst` nor `group_dst` is given.
    group_dst : int, optional
        Rank of the destination in `group`, instead of `dst`.
    group, weights_only, pickle
        As for :func:`broadcast_object_list`.

    Raises
    ------
    TypeError, ValueError
        On all ranks, naming the rank whose object the codec does not carry, or whose list is
        missing, short or in the wrong place.
    CodecError
        On the destination, when it cannot read what came.
    DistMismatchError
        On all ranks, when they name different destinations.

    Notes
    -----
    Outside the group it warns and does nothing. Source: ``torch.distributed.gather_object``.
    """
    api = "gather_object"
    if (pg := group_of(api, group)) is None:
        return
    pickle = False if weights_only else pickle
    comm = pg.carrier
    with op_range(api, pg.members.name), refusing_parts(agreeing(comm), api, 2):
        root = root_of(pg, dst, group_dst, "dst")
        here = comm.rank == root
        part = Part(api, comm.rank)
        wrong = _wrong_place(object_gather_list, comm.size, here)
        if wrong:
            part.refuse(ValueError(wrong))
        part.encode(obj, pickle)
        sizes = gather_sizes(comm, part, 0)
        payloads = [np.empty(size, np.uint8) for size in sizes] if here else None
        comm.gather(part.data, payloads, root, api=api)
    if payloads is not None and object_gather_list is not None:
        objects = [decode(api, i, data, pickle) for i, data in enumerate(payloads)]
        object_gather_list[: comm.size] = objects


def scatter_object_list(
    scatter_object_output_list: list[Any],
    scatter_object_input_list: list[Any] | None = None,
    src: int | None = None,
    group: ProcessGroup | None = None,
    group_src: int | None = None,
    weights_only: bool = False,
    *,
    pickle: bool | None = None,
) -> None:
    """Give each rank one object of a list on the source rank.

    All ranks of the group must call it.

    Parameters
    ----------
    scatter_object_output_list : list
        Result: its first item becomes this rank's object. At least one item long.
    scatter_object_input_list : list, optional
        On the source: one object for each rank of the group. Ignored on the other ranks.
    src, group, group_src, weights_only, pickle
        As for :func:`broadcast_object_list`.

    Raises
    ------
    TypeError, ValueError
        On all ranks, when the source's list is missing, of another length than the group's size,
        or holds something that the codec does not carry. On one rank, when its output list is
        none: it raises after it has taken part.
    CodecError
        On a rank that cannot read what came, for example a pickle that it does not allow.
    DistMismatchError
        On all ranks, when they name different sources.

    Notes
    -----
    Outside the group it warns and does nothing. Source: ``torch.distributed.scatter_object_list``.
    """
    api = "scatter_object_list"
    if (pg := group_of(api, group)) is None:
        return
    pickle = False if weights_only else pickle
    comm = pg.carrier
    with op_range(api, pg.members.name), refusing_parts(agreeing(comm), api, 2):
        root = root_of(pg, src, group_src, "src")
        part = Part(api, root)
        header = np.zeros(comm.size + 1, np.int64)
        inputs = None
        if comm.rank == root:
            inputs = _encode_each(part, scatter_object_input_list, comm.size, pickle)
            header[0] = part.size if part.error else 0
            header[1:] = [data.nbytes for data in inputs]
        comm.broadcast(header, root, api=api)
        if header[0] < 0:
            text = part.data if part.error else np.empty(-int(header[0]), np.uint8)
            comm.broadcast(text, root, api=api)
            part.fail([text])
        data = np.empty(int(header[1 + comm.rank]), np.uint8)
        comm.scatter(data, inputs, root, api=api)
    if not isinstance(scatter_object_output_list, list) or not scatter_object_output_list:
        raise ValueError(f"{api}: scatter_object_output_list must be a list of at least one item")
    scatter_object_output_list[0] = decode(api, root, data, pickle)


def _wrong_place(given: Any, size: int, here: bool) -> str:
    """What is wrong with the list of a gather_object, or an empty text."""
    if here and (not isinstance(given, list) or len(given) < size):
        return f"object_gather_list must be a list of at least {size} items on the destination rank"
    if given and not here:
        return "object_gather_list must be None on every rank but the destination"
    return ""


def _encode_each(part: Part, objects: Any, size: int, pickle: bool | None) -> list[Any]:
    """Encode one object for each rank; on an error all are empty and the part holds the reason."""
    if not isinstance(objects, list) or len(objects) != size:
        given = f"{len(objects)} items" if isinstance(objects, list) else type(objects).__name__
        part.refuse(
            ValueError(
                f"scatter_object_input_list must be a list of {size} items, one for each rank of "
                f"the group, not {given}"
            )
        )
    encoded = []
    for i, obj in enumerate(objects if part.error is None else ()):
        try:
            encoded.append(buffer(codec.encode(obj, pickle=pickle)))
        except Exception as exc:
            part.refuse(type(exc)(f"the object for rank {i}: {exc}") if _plain(exc) else exc)
            break
    return encoded if part.error is None else [np.empty(0, np.uint8)] * size


def _plain(exc: Exception) -> bool:
    """Say whether an exception is made from one text, so that text may be put before its own."""
    return type(exc) in (TypeError, ValueError)
