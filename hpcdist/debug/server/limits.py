"""Bounds for connections: how many there are, how long each may take, how much it may send.

aiohttp bounds lines, headers and bodies, but waits for ever for the rest of a request, and takes
any number of connections. So each protocol of its server gets one of these around it.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

#: Seconds in which a request must be complete, and between two of them.
PATIENCE = 10.0
#: Seconds from a request to the end of its answer, for a client that reads slowly.
LONGEST = 60.0
#: Connections; one more ends the one that has been idle longest.
MOST = 64


class Limits:
    """The connections of one listening socket.

    Parameters
    ----------
    make : callable
        Makes a protocol, as ``loop.create_server`` calls it.
    room : int
        Bytes that a request may have, with its head.
    """

    def __init__(self, make: Callable[[], asyncio.Protocol], room: int) -> None:
        self._make = make
        self.room = room
        self.idle: OrderedDict[_Bounded, None] = OrderedDict()
        self.open: dict[Any, _Bounded] = {}
        self.ended = 0  # connections that were ended here

    def __call__(self) -> asyncio.Protocol:
        """Return the protocol of a new connection."""
        return _Bounded(self._make(), self)

    def begin(self, transport: Any) -> None:
        """Note that a request has been received: its answer may take longer."""
        if bounded := self.open.get(transport):
            bounded.allow(LONGEST)
            self.idle.pop(bounded, None)

    def end(self, transport: Any) -> None:
        """Note that a request has been answered."""
        if bounded := self.open.get(transport):
            bounded.received = 0
            bounded.allow(LONGEST)  # the answer may not have been read yet
            self.idle[bounded] = None


class _Bounded(asyncio.Protocol):
    """A protocol, and the bounds of its connection."""

    def __init__(self, inner: asyncio.Protocol, limits: Limits) -> None:
        self._inner = inner
        self._limits = limits
        self._transport: Any = None
        self._timer: asyncio.TimerHandle | None = None
        self.received = 0

    def allow(self, seconds: float) -> None:
        """Let the connection go on for so long from now on."""
        if self._timer:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(seconds, self.cut)

    def cut(self) -> None:
        """End the connection."""
        self._limits.ended += 1
        self._forget()  # now: the loop calls connection_lost later
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the place of the connection that has been idle longest, if there are too many."""
        limits = self._limits
        self._transport = transport
        limits.open[transport] = self
        limits.idle[self] = None
        self.allow(PATIENCE)
        self._inner.connection_made(transport)
        if len(limits.open) > MOST:
            next(iter(limits.idle), self).cut()

    def data_received(self, data: bytes) -> None:
        """Pass data on, unless the request is too long."""
        if self.received == 0:
            self.allow(PATIENCE)
        self.received += len(data)
        if self.received > self._limits.room:
            self.cut()
        else:
            self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        """Pass it on."""
        return self._inner.eof_received()

    def pause_writing(self) -> None:
        """Pass it on."""
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        """Pass it on."""
        self._inner.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._forget()
        self._inner.connection_lost(exc)

    def _forget(self) -> None:
        if self._timer:
            self._timer.cancel()
        self._limits.open.pop(self._transport, None)
        self._limits.idle.pop(self, None)
