"""The server of a TCPStore as a client sees it: where it is, and the connections to it."""

from __future__ import annotations

import time

from hpcdist import _store as native
from hpcdist import config
from hpcdist.errors import DistStoreError, StoreTimeoutError

from . import _net as net
from ._common import Deadline

#: A connection that was idle for this many nanoseconds is looked at before it is used.
_FRESH_NS = 1_000_000_000
#: Connections that one store keeps for its next calls.
_KEPT = 8


def idle_limit() -> float:
    """Seconds after which a server closes a connection, or 0; at least two of _FRESH_NS.

    A client would take one that is closed sooner for one whose server has ended.
    """
    seconds = float(config.get("store_idle"))
    return max(seconds, 2e-9 * _FRESH_NS) if seconds else 0.0


class Peer:
    """A server, and this process's connections to it."""

    def __init__(self, host: str, port: int, key: bytes) -> None:
        self.host = host
        self.port = port
        self.key = key
        self.addresses: list[net.Address] = []
        self.identity = b""
        self.links = native.Links(_KEPT, _FRESH_NS)
        #: Only in the master; the server runs as long as this object lives.
        self.server: native.Server | None = None

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"TCPStore at {host}:{self.port}"

    def ask(
        self, op: int, items: tuple[str | bytes, ...], number: int, wait_ns: int, seconds: float
    ) -> tuple[int, int, list[bytes]]:
        """Send a request and return the reply, over a new connection if all are in use."""
        deadline = Deadline(seconds)
        while True:
            left = deadline.left()
            waits = max(0, wait_ns - int((seconds - left) * 1e9))
            reply = self.links.ask(op, items, number, waits, left)
            if reply is not None:
                return reply
            self.connect(deadline)

    def connect(self, deadline: Deadline) -> None:
        """Make a connection for the next call."""
        self.links.keep(self._connect(deadline, patient=not self.identity))

    def _connect(self, deadline: Deadline, patient: bool) -> native.Link:
        """Connect; with `patient`, also retry refused connections: the server may start later."""
        nap = 0.005
        problem = ""
        while True:
            try:
                link = self._try(deadline)
            except native.LinkError as error:
                # the last attempt ends at the deadline; the reason before it tells more
                if error.reason != "late" or not problem:
                    problem = self._refusal(error, patient)
            except OSError as error:
                problem = error.strerror or str(error)
                if not patient and not isinstance(error, TimeoutError):
                    raise DistStoreError(
                        f"{self} is gone: {problem}. Its process has ended or was killed"
                    ) from error
            else:
                return self._known(link)
            if deadline.expired():
                raise StoreTimeoutError(
                    f"{self}: no connection within {round(deadline.seconds * 1000)}ms: {problem}. "
                    "Is rank 0 running, and are host and port the same everywhere?"
                )
            time.sleep(min(nap, deadline.left()))
            nap = min(1.5 * nap, 0.25)

    def _try(self, deadline: Deadline) -> native.Link:
        if not self.addresses:
            self.addresses = net.resolve(self.host, self.port, deadline)
        sock = net.connect(self.addresses, deadline.left())
        end = native.clock() + int(deadline.left() * 1e9)
        return native.Link(sock.detach(), self.key, end)

    def _refusal(self, error: native.LinkError, patient: bool) -> str:
        """Raise the error of a failed handshake, or return the reason to try again."""
        if error.reason == "refused":
            raise DistStoreError(
                f"{self} does not accept this process's key. All processes of a job need the same: "
                "set HPCDIST_STORE_KEY, or use one key file (HPCDIST_STORE_KEY_FILE)"
            ) from None
        if error.reason == "impostor":
            raise DistStoreError(
                f"{self} cannot prove that it knows the job's key: it is another job's, or an "
                "impostor"
            ) from None
        if error.reason == "foreign":
            raise DistStoreError(
                f"{self}: what answers there is no hpcdist store of this version"
            ) from None
        if error.reason == "late":
            return "it accepted the connection and says nothing: it is stopped, or no hpcdist store"
        if error.reason == "crowded":
            return "it has as many connections as it may (HPCDIST_STORE_CONNECTIONS)"
        if not patient:
            raise DistStoreError(f"{self} is gone: it closed the connection") from None
        return "it closed the connection"

    def _known(self, link: native.Link) -> native.Link:
        if not self.identity:
            self.identity = link.identity
        elif self.identity != link.identity:
            link.close()
            raise DistStoreError(
                f"{self} is gone: another store has been started at its address, which does not "
                "have its keys"
            )
        return link
