"""Pinned buffers, and how tensors on a device pass through them piece by piece."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from hpcdist.errors import DistError, DistTimeoutError

#: Number of buffers. In place: one is filled, one is with MPI, one is emptied, one is to spare.
BUFFERS = 4
#: PinnedPool that a group keeps of each kind; for collectives the one that was not used for longest
#: makes way for a new stream's.
KEPT = 4


class Copy(NamedTuple):
    """Some bytes of a tensor on the device, and their place in a buffer."""

    bytes: Any
    start: int
    length: int
    at: int


class Piece(NamedTuple):
    """What passes through the buffers at once.

    ``move`` is given the buffer that was filled and the one that will be emptied, and calls MPI.
    """

    loads: Sequence[Copy]
    move: Callable[[Any, Any], None]
    stores: Sequence[Copy]


class PinnedBuffers:
    """Pinned buffers with a stream for each direction; serves one operation at a time.

    Parameters
    ----------
    runtime : object
        Of :mod:`hpcdist.backends.cuda`.
    index : int
        The device.
    size : int
        Bytes of one buffer.
    count : int
        Number of buffers.
    """

    def __init__(self, runtime: Any, index: int, size: int, count: int = BUFFERS) -> None:
        self.runtime = runtime
        self.size = size
        self.down = runtime.stream(index, False)
        self.up = runtime.stream(index, False)
        self.buffers = [runtime.pinned(size) for _ in range(count)]
        #: Event after which the last operation has emptied the buffers.
        self.emptied: Any = None

    def stages(self, two_buffers: bool) -> list[tuple[Any, Any]]:
        """Pairs of what is filled and what is emptied: the same buffer, or two."""
        buffers = self.buffers
        if two_buffers:
            return list(zip(buffers[::2], buffers[1::2], strict=True))
        return [(each, each) for each in buffers]

    def load(self, buffer: Any, copies: Sequence[Copy]) -> Any:
        """Start to fill a buffer; the event tells when it is filled. None: there is nothing."""
        return self._copy(self.down, buffer, copies, False)

    def store(self, buffer: Any, copies: Sequence[Copy]) -> Any:
        """Start to empty a buffer; the event tells when it may be filled again."""
        return self._copy(self.up, buffer, copies, True)

    def _copy(self, stream: Any, buffer: Any, copies: Sequence[Copy], up: bool) -> Any:
        some = False
        for data, start, length, at in copies:
            if length:
                there, here = data[start : start + length], buffer[at : at + length]
                self.runtime.copy(stream, *((there, here) if up else (here, there)))
                some = True
        return self.runtime.record(stream) if some else None

    def reach(self, *events: Any) -> None:
        """Wait here for events, as far as there are any."""
        for event in events:
            if event is not None:
                self.runtime.reach(event)

    def end(self) -> Any:
        """The event after which an operation is done and the buffers may be used again."""
        self.emptied = self.runtime.record(self.up)
        return self.emptied

    def settle(self) -> None:
        """Wait here until no copy touches the buffers any more."""
        self.reach(self.runtime.record(self.down), self.runtime.record(self.up))
        self.emptied = None


class PinnedPool:
    """The buffers of a group: a set for each of the caller's streams, and those of messages."""

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime
        self._lock = threading.RLock()  # a signal handler may make an operation too
        self._kept: OrderedDict[tuple[int, int, int], PinnedBuffers] = OrderedDict()
        self._idle: dict[tuple[int, int, int], list[PinnedBuffers]] = {}

    def for_stream(self, index: int, stream: int, size: int) -> PinnedBuffers:
        """Return the buffers for collectives of a device and of a stream, by its handle."""
        key = (index, stream, size)
        found = self._kept.get(key)
        if found is None:
            while len(self._kept) >= KEPT:
                self._kept.popitem(last=False)[1].settle()
            found = self._kept[key] = PinnedBuffers(self._runtime, index, size)
        self._kept.move_to_end(key)
        return found

    def drop(self, pinned: PinnedBuffers) -> None:
        """Forget buffers that MPI may still use; their users keep them alive."""
        for key, each in list(self._kept.items()):
            if each is pinned:
                del self._kept[key]

    @contextlib.contextmanager
    def borrowed(self, index: int, size: int, count: int) -> Iterator[PinnedBuffers]:
        """Lend buffers for one message; drop them after an error, as MPI may still use them."""
        with self._lock:
            idle = self._idle.setdefault((index, size, count), [])
            pinned = idle.pop() if idle else None
        if pinned is None:
            pinned = PinnedBuffers(self._runtime, index, size, count)
        pinned.reach(pinned.emptied)
        try:
            yield pinned
        except BaseException:
            with contextlib.suppress(Exception):  # the first error is reported
                pinned.settle()
            raise
        with self._lock:
            if len(idle) < KEPT:
                idle.append(pinned)
                return
        pinned.settle()

    def clear(self) -> None:
        """Free all memory."""
        idle = [each for some in self._idle.values() for each in some]
        for pinned in [*self._kept.values(), *idle]:
            pinned.settle()
        self._kept.clear()
        self._idle.clear()


def wait_until_reached(runtime: Any, ready: Any, seconds: float) -> None:
    """Wait here until the caller's stream has reached an event; Ctrl-C ends it.

    Copies and MPI end by themselves or have deadlines; what the program has put into its stream
    before need not.
    """
    until, nap = time.monotonic() + seconds, 1e-5
    while not runtime.reached(ready):
        if time.monotonic() > until:
            raise DistTimeoutError(
                f"what was in the stream before this operation of a CUDA tensor is not done after "
                f"{seconds:g} s: look at the kernels, or operations of NCCL, that were enqueued "
                "before it"
            )
        time.sleep(nap)
        nap = min(nap * 1.5, 2e-4)


def pipeline(
    pinned: PinnedBuffers,
    ready: Any,
    pieces: Sequence[Piece],
    two_buffers: bool,
    seconds: float,
    tell: Callable[[BaseException], None],
) -> Any:
    """Pass tensors through the buffers: while a piece is with MPI, others are copied both ways.

    Parameters
    ----------
    pinned : PinnedBuffers
        No other operation may use it meanwhile.
    ready : object
        Event after which the tensors may be touched.
    pieces : sequence of Piece
        In order.
    two_buffers : bool
        Whether what MPI reads and what it writes are different buffers.
    seconds : float
        Within which `ready` has to be reached.
    tell : callable
        Given what went wrong here while other ranks still count on this one; not what MPI said,
        which they hear as well.

    Returns
    -------
    object
        Event after which the tensors hold the result.
    """
    stages = pinned.stages(two_buffers)
    depth = len(stages)
    stored: list[Any] = [pinned.emptied] * depth
    loaded: dict[int, Any] = {}
    begun = moved = 0
    moving = False
    try:
        wait_until_reached(pinned.runtime, ready, seconds)
        if pinned.emptied is not None:
            # It may empty the buffers that are filled here, into tensors that are read here.
            pinned.runtime.order(pinned.down, pinned.emptied)
        for number, piece in enumerate(pieces):
            while begun < min(number + depth, len(pieces)):
                after = stored[begun % depth]
                if after is not None and not two_buffers:
                    pinned.runtime.order(pinned.down, after)
                loaded[begun] = pinned.load(stages[begun % depth][0], pieces[begun].loads)
                begun += 1
            source, target = stages[number % depth]
            # MPI reads what was filled, and writes where nothing is being emptied any more
            pinned.reach(loaded.pop(number), stored[number % depth])
            moving = True
            piece.move(source, target)
            moving, moved = False, number + 1
            stored[number % depth] = pinned.store(target, piece.stores)
    except BaseException as error:
        if moved < len(pieces) and not (moving and isinstance(error, DistError)):
            tell(error)
        with contextlib.suppress(Exception):  # the first error is reported
            pinned.settle()
        if moved and isinstance(error, DistError):
            where = (
                f"This was piece {moved + 1} of {len(pieces)} of a CUDA tensor: those before it "
                "are done, and what is written is changed in part."
            )
            found = type(error)(f"{error} {where}")
            if error.refusal is not None:
                reason = f"{error.refusal.reason}. {where}"
                found.refusal = error.refusal._replace(reason=reason)
            raise found from None
        raise
    return pinned.end()
