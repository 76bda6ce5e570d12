"""Send and receive for Python objects."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

import numpy as np

from hpcdist._engine import OBJECTS, op_range, tags
from hpcdist.backends.dispatch import serving
from hpcdist.collectives._parts import Part, check_list, decode, group_of, of_message
from hpcdist.errors import DistMismatchError
from hpcdist.groups.process_group import ProcessGroup

#: Tag of the headers, so that they never match a tensor's receive. It is the largest tag that every
#: MPI allows: MPI guarantees tags up to 32767, and the engine uses five bits.
_TAG = 1022

#: Tags of the payloads, a new one for each: threads may send and receive several messages between
#: two ranks at once, and then neither end begins payloads in the order of their headers.
_numbers = count()


class _Message:
    """A message that arrives, or that arrived in part before an exception ended its receive."""

    __slots__ = ("data", "generation", "header", "owner", "peer")

    def __init__(self, generation: int) -> None:
        self.generation, self.owner = generation, threading.get_ident()
        self.peer, self.header = -1, [0, 0, 0]
        self.data: Any = None


#: Per group: the messages whose header has arrived, until their objects are in the caller's list.
#: The next receive continues with one that no call works on any more.
_begun: weakref.WeakKeyDictionary[Any, dict[_Message, None]] = weakref.WeakKeyDictionary()
_claiming = threading.RLock()


def send_object_list(
    object_list: list[Any],
    dst: int | None = None,
    group: ProcessGroup | None = None,
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
    if (pg := group_of("send_object_list", group)) is None:
        return
    pickle = False if weights_only else pickle
    comm = pg.carrier
    peer = pg.members.peer(comm.rank, dst, group_dst, "dst", "Copy the objects.")
    length = check_list(object_list, "object_list")
    part = Part("send_object_list", comm.rank)
    part.encode(list(object_list), pickle)
    with op_range("send_object_list", pg.members.name):
        _send(comm, peer, np.array([part.size, length, 0], np.int64), part.data)
    if part.error:
        part.fail([part.data])


def recv_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: ProcessGroup | None = None,
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
    group_src : int, optional
        Rank of the sender in `group`, instead of `src`.
    group, device, use_batch, weights_only
        As for :func:`send_object_list`.
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
    if (pg := group_of(api, group)) is None:
        return -1
    pickle = False if weights_only else pickle
    comm = pg.carrier
    peer = -1
    if src is not None or group_src is not None:
        peer = pg.members.peer(comm.rank, src, group_src, "src", "Copy the objects.")
    length = check_list(object_list, "object_list")
    messages = _begun.setdefault(pg, {})
    message = _claim(messages, peer, pg.members.generation)
    try:
        with op_range(api, pg.members.name):
            _receive(comm, messages, message, peer)
        try:
            objects = _objects(api, comm.rank, message, length, pickle)
        except BaseException as error:
            if of_message(error):  # the next call could not decode it either
                messages.pop(message)
            raise
        object_list[:] = objects
        messages.pop(message)  # no signal handler runs between the line above and this one
        return int(pg.members.ranks[message.peer])
    finally:
        message.owner = 0


# No signal handler runs inside extend(): every operation that MPI has started is in the list.


# comm is no Carrier in these: where they pass tag_kind, a Comm stands behind it.


def _send(comm: Any, peer: int, header: Any, data: Any) -> None:
    """Send both or neither; over MPI that is true even if a signal handler raises."""
    here = serving(comm, header).native
    if here is None:
        comm.send(header, peer, _TAG)
        comm.send(data, peer, _TAG)
        return
    header[2] = next(_numbers) % tags(here)
    calls = (
        partial(comm.isend, header, peer, _TAG),
        partial(comm.isend, data, peer, int(header[2]), tag_kind=OBJECTS),
    )
    works: list[Any] = []
    try:
        works.extend(map(partial.__call__, calls))
    except BaseException:
        if len(works) == 1:  # a hook of the second one raised: the receiver waits for it
            works.append(here.isend(data, peer, int(header[2]), tag_kind=OBJECTS))
        raise
    for work in works:
        work.wait()


def _claim(messages: dict[_Message, None], peer: int, generation: int) -> _Message:
    """Return the first message of a peer, or of any, whose receive was interrupted; or a new one.

    A message belongs to the thread that receives it until that leaves its call.
    """
    with _claiming:
        for message in list(messages):
            if message.generation != generation:  # its sender has another rank now, or none
                messages.pop(message, None)
            elif peer in (-1, message.peer) and _is_free(message):
                message.owner = threading.get_ident()
                return message
    return _Message(generation)


def _is_free(message: _Message) -> bool:
    """Whether no call works on a message; a second signal may have kept one from saying so."""
    if message.owner != threading.get_ident():
        return message.owner == 0
    frame: Any = sys._getframe()
    while frame is not None:  # is this a signal handler's call, within that call?
        if frame.f_code is recv_object_list.__code__ and frame.f_locals.get("message") is message:
            return False
        frame = frame.f_back
    return True


def _receive(comm: Any, messages: dict[_Message, None], message: _Message, peer: int) -> None:
    """Receive a message; what arrived before an exception is kept for the next call."""
    if message.peer < 0:
        header = np.empty(3, np.int64)

        def keep(source: int) -> None:
            message.peer, message.header = source, header.tolist()
            messages[message] = None

        _arrive(comm, partial(comm.irecv, header, peer, _TAG), (header, peer, _TAG), keep)
    if message.data is None:
        size, _, number = message.header
        payload = np.empty(abs(size), np.uint8)

        def keep_all(_: int) -> None:
            message.data = payload

        begin = partial(comm.irecv, payload, message.peer, number, tag_kind=OBJECTS)
        _arrive(comm, begin, (payload, message.peer, _TAG), keep_all)


def _arrive(comm: Any, begin: partial[Any], rest: Any, keep: Callable[[int], None]) -> None:
    """Receive into an array, and keep the data if it has arrived, even after an exception."""
    if serving(comm, rest[0]).native is None:
        keep(int(comm.recv(*rest)))
        return
    works: list[Any] = []
    try:
        works.extend(map(partial.__call__, (begin,)))
        works[0].wait()
        keep(int(works[0].source_rank()))
    except BaseException:
        if works and not works[0].cancel() and works[0].exception() is None:
            keep(works[0].source_rank())
        raise


def _objects(api: str, rank: int, message: _Message, length: int, pickle: bool | None) -> Any:
    """Return the objects of a message that has arrived."""
    size, sent, _ = message.header
    if size < 0:
        Part(api, rank).fail([message.data])
    if sent != length:
        raise DistMismatchError(
            f"{api}: rank {message.peer} sent a list of {sent} objects, rank {rank} receives into "
            f"a list of {length}"
        )
    return decode(api, message.peer, message.data, pickle)
