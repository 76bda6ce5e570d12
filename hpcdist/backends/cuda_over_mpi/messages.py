"""Messages of CUDA tensors from rank to rank.

A tensor that fits into one buffer travels as one message, like a host tensor. A longer one is
announced by a message of its own (its bytes, element type, bytes of a piece, and number), and
follows in pieces, under the number that its sender gave it. Both are of kinds that no tensor of a
user's matches. Messages between the same ranks with the same tag keep their order; others do not
wait for each other, and neither do those of host tensors, nor receives from any rank.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

from hpcdist._engine import ANNOUNCEMENT, DEVICE_LEAST, PIECE, check_tag, disordered, tags
from hpcdist.backends import cuda
from hpcdist.backends.overlaps import refuse_overlap
from hpcdist.errors import DistBackendError, DistError, DistMismatchError

from . import aware, direct
from .core import Core
from .device_tensor import DeviceTensor
from .lane import StagedJob, StagedWork
from .pinned import Copy, PinnedBuffers, wait_until_reached

#: Bytes: messages up to here have buffers of their own, so that many in flight need little memory.
_SHORT = 64 << 10


class _Numbers:
    """Numbers of the long messages to one rank; none is used twice at a time.

    One whose message failed is not used again, because parts of that may still be on their way.
    """

    def __init__(self, count: int) -> None:
        self._count, self._next = count, 0
        self._used: set[int] = set()
        self._changed = threading.Condition()

    @contextmanager
    def one(self) -> Iterator[int]:
        """Use a number for one message."""
        with self._changed:
            while len(self._used) == self._count:
                self._changed.wait(1.0)
            while self._next in self._used:
                self._next = (self._next + 1) % self._count
            number = self._next
            self._used.add(number)
            self._next = (number + 1) % self._count
        yield number
        with self._changed:
            self._used.remove(number)
            self._changed.notify()


class Messages(Core):
    """The part of a group that sends and receives."""

    _numbers: dict[int, _Numbers] | None = None

    def isend(self, tensor: Any, dst: int, tag: int = 0) -> Any:
        return self._post(tensor, dst, tag, True, True)

    def irecv(self, tensor: Any, src: int = -1, tag: int = 0) -> Any:
        return self._post(tensor, src, tag, False, True)

    def send(self, tensor: Any, dst: int, tag: int = 0) -> None:
        """Send, and wait until the tensor may be changed."""
        self._post(tensor, dst, tag, True, False)

    def recv(self, tensor: Any, src: int = -1, tag: int = 0) -> int:
        return int(self._post(tensor, src, tag, False, False))

    def batch_isend_irecv(self, operations: Sequence[tuple[bool, Any, int, int]]) -> list[Any]:
        """Begin messages, all receives before the first send, unless one of them is wrong."""
        parts = self.look_at_batch(operations)
        works: list[Any] = [None] * len(parts)
        self._ready("batch_isend_irecv", True)
        with ExitStack() as lanes:  # with a thread each: none begins if another one could not
            for sends, _, peer, tag in operations:
                lanes.enter_context(self._lanes.use((sends, peer, tag))).prepare()
            for now in (False, True):
                for place, (sends, tensor, peer, tag) in enumerate(operations):
                    if sends is now:
                        about = parts[place], tensor, peer, tag, sends, True
                        works[place] = self._begin_message(*about)
        return works

    def look_at_batch(self, operations: Sequence[tuple[bool, Any, int, int]]) -> list[DeviceTensor]:
        """Return the tensors of a batch as bytes; raise if it cannot begin."""
        parts = [self._look_at(tensor, peer, tag, sends) for sends, tensor, peer, tag in operations]
        refuse_overlap(operations, parts)
        return parts

    def _look_at(self, tensor: Any, peer: int, tag: int, sends: bool) -> DeviceTensor:
        part = DeviceTensor.inspect(tensor, "tensor", not sends)
        if part.strides is not None:
            raise disordered(sends)
        if peer >= self.size or peer < (0 if sends else -1):
            raise ValueError(f"rank {peer} is not in group {self.name!r} of {self.size} ranks")
        check_tag(self._comm, tag)
        return part

    def _post(self, tensor: Any, peer: int, tag: int, sends: bool, asynchronous: bool) -> Any:
        part = self._look_at(tensor, peer, tag, sends)
        return self._begin_message(part, tensor, peer, tag, sends, asynchronous)

    def _begin_message(
        self,
        part: DeviceTensor,
        tensor: Any,
        peer: int,
        tag: int,
        sends: bool,
        asynchronous: bool,
    ) -> Any:
        api = ("i" if asynchronous else "") + ("send" if sends else "recv")
        self._ready(api, asynchronous)
        runtime = cuda.runtime()
        current = runtime.current(part.device)
        ready = runtime.record(current)
        size = self._piece()
        source = [-1]
        straight = part.size > DEVICE_LEAST and aware.takes_device_memory()

        def run() -> Any:
            before = runtime.index()
            runtime.enter(part.device)
            try:
                return move()
            finally:
                runtime.enter(before)  # it may be the caller's thread

        def move() -> Any:
            if straight:
                wait_until_reached(runtime, ready, self.timeout)
                call = self._comm.isend if sends else self._comm.irecv
                work = call(direct.memory(part), peer, tag, on_device=True)
                if sends:
                    work.wait()
                else:
                    late = _finish(work)
                    source[0] = int(work.source_rank())
                    _raise(late)
                return None
            room = min(size, _SHORT) if part.size <= _SHORT else size
            pool = self._buffers()
            with pool.borrowed(part.device, room, 2 if part.size > size else 1) as pinned:
                if sends:
                    self._send(pinned, ready, part, peer, tag, size)
                else:
                    wait_until_reached(runtime, ready, self.timeout)
                    source[0] = self._recv(pinned, part, peer, tag, size)
                return pinned.end()

        way = "to" if sends else "from"
        whom = f"rank {peer}" if peer >= 0 else "any rank"
        job = StagedJob(
            run, f"{api} (cuda) {way} {whom} in group {self.name!r} on rank {self.rank}"
        )
        with self._lanes.use((sends, peer, tag)) as lane:
            tensors = [tensor]
            self._begin(lane, job, tensors, asynchronous)
            if asynchronous:
                begun_on = runtime.handle(current)
                return StagedWork(runtime, part.device, begun_on, job, tensors, tensors, source)
        if job.event is not None:
            runtime.order(current, job.event)
        return source[0]

    def _numbers_to(self, peer: int) -> _Numbers:
        with self._lock:
            if self._numbers is None:
                self._numbers = {}
            if peer not in self._numbers:
                self._numbers[peer] = _Numbers(tags(self._comm))
            return self._numbers[peer]

    def _send(
        self,
        pinned: PinnedBuffers,
        ready: Any,
        part: DeviceTensor,
        peer: int,
        tag: int,
        size: int,
    ) -> None:
        wait_until_reached(pinned.runtime, ready, self.timeout)
        if part.size <= size:
            self._send_pieces(pinned, part, peer, tag, size, None)
            return
        with self._numbers_to(peer).one() as number:
            facts = np.array([part.size, part.dtype.code, size, number], np.int64)
            self._comm.isend(facts, peer, tag, tag_kind=ANNOUNCEMENT).wait()
            self._send_pieces(pinned, part, peer, tag, size, number)

    def _send_pieces(
        self,
        pinned: PinnedBuffers,
        part: DeviceTensor,
        peer: int,
        tag: int,
        size: int,
        number: int | None,
    ) -> None:
        kind = part.dtype.torch_dtype
        copies = _copies(part, size)
        begun = 0

        def send(data: Any) -> None:
            nonlocal begun
            if number is None:
                work = self._comm.isend(data.view(kind), peer, tag)
            else:
                work = self._comm.isend(data, peer, number, tag_kind=PIECE)
            begun += 1
            work.wait()

        try:
            filled = {0: pinned.load(pinned.buffers[0], copies[:1])}
            for place, copy in enumerate(copies):
                if place + 1 < len(copies):  # MPI is done with the other buffer
                    buffer = pinned.buffers[(place + 1) % 2]
                    filled[place + 1] = pinned.load(buffer, copies[place + 1 : place + 2])
                pinned.reach(filled.pop(place))
                send(pinned.buffers[place % 2][: copy.length])
        except DistError:
            raise  # MPI's error: there is no peer to signal
        except BaseException:
            if begun < len(copies):  # this ends the receive of the peer, which waits for more
                send(pinned.buffers[0][:0])
            raise

    def _recv(
        self, pinned: PinnedBuffers, part: DeviceTensor, peer: int, tag: int, size: int
    ) -> int:
        kind = part.dtype.torch_dtype
        if part.size <= size:
            data = pinned.buffers[0][: part.size]
            work = self._comm.irecv(data.view(kind), peer, tag)
            late = _finish(work)
            pinned.store(pinned.buffers[0], _copies(part, size))
            _raise(late)
            return int(work.source_rank())
        facts = np.zeros(4, np.int64)
        work = self._comm.irecv(facts, peer, tag, tag_kind=ANNOUNCEMENT)
        late = _finish(work)
        source = int(work.source_rank())
        length, code, theirs, number = facts.tolist()
        if late is not None:
            self._swallow(source, number, length, theirs)
            raise late
        if (length, code, theirs) != (part.size, part.dtype.code, size):
            self._swallow(source, number, length, theirs)
            raise DistMismatchError(
                f"rank {source} sends {length} bytes of element type {code} in pieces of {theirs}; "
                f"rank {self.rank} receives {part.size} bytes of type {part.dtype.code} "
                f"({part.dtype.name}) in pieces of {size}. The message has been thrown away."
            )
        emptied: list[Any] = [None, None]
        arrived = 0
        try:
            for place, copy in enumerate(_copies(part, size)):
                buffer = pinned.buffers[place % 2]
                pinned.reach(emptied[place % 2])
                here = buffer[: copy.length]
                work = self._comm.irecv(here, source, number, tag_kind=PIECE)
                late = _finish(work)
                arrived = copy.start + copy.length
                _raise(late)
                emptied[place % 2] = pinned.store(buffer, [copy])
        except DistMismatchError:
            raise DistBackendError(
                f"rank {source} could not send the rest of a message of {part} to rank "
                f"{self.rank}: {arrived} of {part.size} bytes have arrived; see the error of rank "
                f"{source}"
            ) from None
        except DistError:
            raise
        except BaseException:
            # the sender goes on, and what it sends must not be taken for another message's
            self._swallow(source, number, part.size - arrived, size)
            raise
        return source

    def _swallow(self, source: int, number: int, length: int, size: int) -> None:
        """Receive and drop a message, so that it is not taken for the next one."""
        data = np.empty(min(size, length), np.uint8)
        while length > 0:
            here = data[: min(size, length)]
            self._comm.irecv(here, source, number, tag_kind=PIECE).wait()
            length -= len(here)


def _finish(work: Any) -> BaseException | None:
    """Wait for a receive; after Ctrl-C it must not take a later message.

    Returns Ctrl-C's exception if the message has arrived nevertheless.
    """
    try:
        work.wait()
    except BaseException as error:
        if work.cancel() or work.exception() is not None:
            raise
        return error
    return None


def _raise(error: BaseException | None) -> None:
    if error is not None:
        raise error


def _copies(part: DeviceTensor, size: int) -> list[Copy]:
    return [
        Copy(part.bytes, start, min(size, part.size - start), 0)
        for start in range(0, max(part.size, 1), size)
    ]
