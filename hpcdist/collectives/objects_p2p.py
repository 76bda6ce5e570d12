"""Send and receive for Python objects."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from itertools import repeat
from typing import Any

import numpy as np

from hpcdist._engine import Comm, op_range
from hpcdist.backends.dispatch import serving
from hpcdist.collectives._parts import Part, check_list, decode, of_message
from hpcdist.errors import DistMismatchError
from hpcdist.groups.state import _resolve

__all__ = ["recv_object_list", "send_object_list"]

#: Tag of object messages between two ranks, so that they never match a tensor's receive. It is the
#: largest tag that every MPI allows: MPI guarantees tags up to 32767, and the engine uses five
#: bits.
_TAG = 1022

#: Per group and sender: the sizes of a message whose payload has not arrived, or arrived while a
#: signal handler raised. The next receive continues from there.
_begun: weakref.WeakKeyDictionary[Any, dict[int, tuple[list[int], Any]]]
_begun = weakref.WeakKeyDictionary()


def send_object_list(
    object_list: list[Any],
    dst: int | None = None,
    group: Any = None,
    device: Any = None,
    group_dst: int | None = None,
    use_batch: bool = False,
    weights_only: bool = False,
    *,
    pickle: bool | None = None,
) -> None:
    """Send the objects in a list to one rank.

    The peer must call :func:`recv_object_list` with a list of the same length.

    Parameters
    ----------
    object_list : list
        The objects.
    dst : int, optional
        World rank of the receiver. One of `dst` and `group_dst` must be given.
    group : ProcessGroup, optional
        None means the default group.
    device : torch.device or str, optional
        Accepted for compatibility with torch; objects always travel through host memory.
    group_dst : int, optional
        Rank of the receiver in `group`, instead of `dst`.
    use_batch : bool
        Accepted for compatibility with torch; it changes nothing here.
    weights_only : bool
        Refuse pickle in this call, also where it is allowed.
    pickle : bool, optional
        Whether pickle may be used for what the codec does not carry; the receiver must allow it
        too. None: as :class:`hpcdist.allow_pickle` and ``HPCDIST_ALLOW_PICKLE`` say.

    Raises
    ------
    TypeError, ValueError
        On both sides, if the codec does not carry an object. The receiver's error has the reason.

    Notes
    -----
    Outside the group it warns and does nothing. Source: ``torch.distributed.send_object_list``.
    """
    pg = _resolve(group)
    pickle = False if weights_only else pickle
    comm = pg._comm
    if comm.rank < 0:
        comm.report("send_object_list", 3)
        return
    peer = pg._peer(dst, group_dst, "dst")
    length = check_list(object_list, "object_list")
    part = Part("send_object_list", comm.rank)
    part.encode(list(object_list), pickle)
    with op_range("send_object_list", pg._name):
        _send(comm, peer, [np.array([part.size, length], np.int64), part.data])
    if part.error:
        part.fail([part.data])


def recv_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: Any = None,
    device: Any = None,
    group_src: int | None = None,
    use_batch: bool = False,
    weights_only: bool = False,
    *,
    pickle: bool | None = None,
) -> int:
    """Receive objects that another rank sends with :func:`send_object_list`.

    Parameters
    ----------
    object_list : list
        Its items are replaced. As long as the sender's list.
    src : int, optional
        World rank of the sender; any rank when neither `src` nor `group_src` is given.
    group : ProcessGroup, optional
        None means the default group.
    device : torch.device or str, optional
        Accepted for compatibility with torch; objects always travel through host memory.
    group_src : int, optional
        Rank of the sender in `group`, instead of `src`.
    use_batch : bool
        Accepted for compatibility with torch; it changes nothing here.
    weights_only : bool
        Refuse pickle in this call, also where it is allowed.
    pickle : bool, optional
        Whether a pickle may be loaded. None: as :class:`hpcdist.allow_pickle` and
        ``HPCDIST_ALLOW_PICKLE`` say; by default, no.

    Returns
    -------
    int
        World rank of the sender; -1 outside the group.

    Raises
    ------
    TypeError, ValueError
        When the sender could not encode its objects.
    CodecError
        If the payload cannot be decoded here, for example a pickle that is not allowed.
    BaseException
        What is no Exception, such as SystemExit, if the decode function of a type raises it. The
        message is consumed, as after all these errors. After the exception of a signal handler the
        next call gets it.
    DistMismatchError
        If the sender's list has another length. The message is consumed; the sender gets no error.

    Notes
    -----
    Outside the group it warns. Source: ``torch.distributed.recv_object_list``.
    """
    api = "recv_object_list"
    pg = _resolve(group)
    pickle = False if weights_only else pickle
    comm = pg._comm
    if comm.rank < 0:
        comm.report(api, 3)
        return -1
    peer = -1
    if src is not None or group_src is not None:
        peer = pg._peer(src, group_src, "src")
    length = check_list(object_list, "object_list")
    with op_range(api, pg._name):
        peer, (size, sent), data = _receive(pg, peer)
    begun = _begun[pg]
    try:
        if size < 0:
            Part(api, comm.rank).fail([data])
        if sent != length:
            raise DistMismatchError(
                f"{api}: rank {peer} sent a list of {sent} objects, rank {comm.rank} receives into "
                f"a list of {length}"
            )
        objects = decode(api, peer, data, pickle)
    except BaseException as error:
        if of_message(error):  # the next call could not decode it either
            begun.pop(peer)
        raise
    object_list[:] = objects
    begun.pop(peer)  # no signal handler runs between the line above and this one
    return int(pg._ranks[peer])


# No signal handler runs inside extend(): every operation that MPI has started is in the list.


def _send(comm: Any, peer: int, messages: list[Any]) -> None:
    """Send all of them or none; over MPI that is true even if a signal handler raises."""
    if not isinstance(serving(comm, messages[0]), Comm):
        for message in messages:
            comm.send(message, peer, _TAG)
        return
    works: list[Any] = []
    works.extend(map(comm.isend, messages, repeat(peer), repeat(_TAG)))
    for work in works:
        work.wait()


def _receive(pg: Any, peer: int) -> tuple[int, list[int], Any]:
    """Receive a message; what arrived before an exception is kept for the next call."""
    comm, begun = pg._comm, _begun.setdefault(pg, {})
    if peer < 0:
        peer = next(iter(begun), peer)
    if peer not in begun:
        header = np.empty(2, np.int64)

        def keep(source: int) -> None:
            begun[source] = (header.tolist(), None)

        peer = _message(comm, header, peer, keep)
    sizes, data = begun[peer]
    if data is None:
        payload = np.empty(abs(sizes[0]), np.uint8)

        def keep_all(source: int) -> None:
            begun[source] = (sizes, payload)

        _message(comm, payload, peer, keep_all)
    return (peer, *begun[peer])


def _message(comm: Any, array: Any, peer: int, keep: Callable[[int], None]) -> int:
    """Receive into an array, and keep the data if it has arrived, even after an exception."""
    if not isinstance(serving(comm, array), Comm):
        source = int(comm.recv(array, peer, _TAG))
        keep(source)
        return source
    works: list[Any] = []
    try:
        works.extend(map(comm.irecv, (array,), (peer,), (_TAG,)))
        works[0].wait()
        source = int(works[0].source_rank())
        keep(source)
        return source
    except BaseException:
        if works and not works[0].cancel() and works[0].exception() is None:
            keep(works[0].source_rank())
        raise
