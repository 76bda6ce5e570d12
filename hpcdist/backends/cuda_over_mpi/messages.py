"""Messages of CUDA tensors from rank to rank.

A tensor that fits into one buffer travels as one message, like a host tensor. A longer one is
announced by a message of its own (its bytes, element type, bytes of a piece, and number), and
follows in pieces, under the number that its sender gave it. Both are of kinds that no tensor of a
user's matches. Messages between the same ranks with the same tag keep their order; others do not
wait for each other.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from hpcdist._engine import ANNOUNCEMENT, DEVICE_LEAST, PIECE, disordered
from hpcdist.backends import cuda
from hpcdist.errors import DistBackendError, DistError, DistMismatchError

from . import aware, direct
from .core import Core
from .device_tensor import DeviceTensor
from .lane import StagedJob, StagedWork
from .pinned import Copy, PinnedBuffers, wait_until_reached

__all__ = ["Messages"]

#: Bytes: messages up to here have buffers of their own, so that many in flight need little memory.
_SHORT = 64 << 10
#: Numbers of long messages: fewer than the tags that any MPI has.
_NUMBERS = 500


class Messages(Core):
    """The part of a group that sends and receives."""

    _numbers: Any = None

    def isend(self, tensor: Any, dst: int, tag: int = 0) -> Any:
        """Begin to send."""
        return self._post(tensor, dst, tag, True, True)

    def irecv(self, tensor: Any, src: int = -1, tag: int = 0) -> Any:
        """Begin to receive, from any rank if src is -1."""
        return self._post(tensor, src, tag, False, True)

    def send(self, tensor: Any, dst: int, tag: int = 0) -> None:
        """Send, and wait until the tensor may be changed."""
        self._post(tensor, dst, tag, True, False)

    def recv(self, tensor: Any, src: int = -1, tag: int = 0) -> int:
        """Receive and wait; returns the sender's rank."""
        return int(self._post(tensor, src, tag, False, False))

    def _post(self, tensor: Any, peer: int, tag: int, sends: bool, later: bool) -> Any:
        api = ("i" if later else "") + ("send" if sends else "recv")
        part = DeviceTensor.inspect(tensor, "tensor", not sends)
        if part.strides is not None:
            raise disordered(sends)
        if peer >= self.size or peer < (0 if sends else -1):
            raise ValueError(f"rank {peer} is not in group {self.name!r} of {self.size} ranks")
        self._ready(api, later)
        runtime = cuda.runtime()
        current = runtime.current(part.device)
        ready = runtime.record(current)
        size = self._piece()
        source = [-1]
        number = next(self._count()) if sends else 0
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
                    self._send(pinned, ready, part, peer, tag, size, number)
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
            if later:
                tensors = [tensor]
                self._held.append((job, tensors))
                lane.start(job)
                return StagedWork(runtime, part.device, job, tensors, tensors, source)
            lane.call(job)
        if job.event is not None:
            runtime.order(current, job.event)
        return source[0]

    def _count(self) -> Any:
        if self._numbers is None:
            self._numbers = itertools.cycle(range(_NUMBERS))
        return self._numbers

    def _send(
        self,
        pinned: PinnedBuffers,
        ready: Any,
        part: DeviceTensor,
        peer: int,
        tag: int,
        size: int,
        number: int,
    ) -> None:
        kind = part.dtype.torch_dtype
        copies = _copies(part, size)
        long = part.size > size
        begun = 0

        def send(data: Any) -> None:
            nonlocal begun
            if long:
                work = self._comm.isend(data, peer, number, tag_kind=PIECE)
            else:
                work = self._comm.isend(data.view(kind), peer, tag)
            begun += 1
            work.wait()

        wait_until_reached(pinned.runtime, ready, self.timeout)
        if long:
            facts = np.array([part.size, part.dtype.code, size, number], np.int64)
            self._comm.isend(facts, peer, tag, tag_kind=ANNOUNCEMENT).wait()
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
