"""A store in one process that the others reach over TCP."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import NoReturn

from hpcdist import _store as native
from hpcdist import config
from hpcdist.errors import DistStoreError, QueueEmptyError, StoreTimeoutError

from . import _net as net
from . import _peer
from ._common import (
    DEFAULT_TIMEOUT,
    Deadline,
    Timeout,
    key_list,
    key_of,
    seconds_of,
    timed_out,
    value_of,
    whole,
)
from ._peer import Peer
from .auth import find_key
from .base import Store, Value

#: A working server answers at the timeout; this many seconds later it counts as frozen.
_GRACE = 0.25
#: Seconds that a connection may take to prove itself, and a message to arrive.
_HANDSHAKE = 5.0
_MESSAGE = 30.0
#: Most connections that have not proved themselves yet.
_STRANGERS = 4096
_servers: dict[tuple[str, int], weakref.ref[native.Server]] = {}
_servers_lock = threading.RLock()  # a signal handler may open a store too


class TCPStore(Store):
    """A store in one process, the master; the others connect to it over TCP.

    The server is a thread of native code: it answers while the master runs Python. It listens on
    the address it was given only. Each connection proves that it knows the job's key, and each
    message carries a code that cannot be made or repeated without it; contents are not encrypted.
    The key is `auth_key`; else ``HPCDIST_STORE_KEY``; else the one in the user's own key file, so
    that processes of one user, on machines that share a home, find each other without doing
    anything.

    Safe to use from several threads at once: each call that waits has a connection of its own. A
    child of fork makes its own connections.

    Parameters
    ----------
    host_name : str
        Name or address of the master's machine, IPv4 or IPv6; ``0.0.0.0`` or ``::`` on the master
        listens on all of its addresses.
    port : int
        Its port; 0 on the master picks a free one, which the attribute ``port`` returns.
    world_size : int, optional
        Number of processes that will use the store, the master included; None or negative if that
        is not fixed. It has to be the same for all.
    is_master : bool
        Whether this process is the master.
    timeout : datetime.timedelta or float
        Time limit in seconds of making the store, and of each operation.
    wait_for_workers : bool
        Whether the master waits here until `world_size` processes have joined.
    multi_tenant : bool
        Whether all masters of this process with the same host and port share one server.
    master_listen_fd : int, optional
        A socket that is bound already, to be used instead of a new one.
    use_libuv : bool
        Accepted for compatibility with torch; no effect.
    auth_key : bytes or str, optional
        The job's key: 32 bytes, or 64 hexadecimal digits.

    Raises
    ------
    ValueError
        If an argument makes no sense.
    DistNetworkError
        If the master cannot listen (at once: the port is in use, the address is not its own), or
        the host is not known.
    StoreTimeoutError
        If no server answers, or not all processes have joined.
    DistStoreError
        If the server has another key, or the processes disagree about `world_size`.

    Notes
    -----
    Local to this process; the others are waited for as said. Source:
    ``torch.distributed.TCPStore``.
    """

    def __init__(
        self,
        host_name: str,
        port: int,
        world_size: int | None = None,
        is_master: bool = False,
        timeout: Timeout = DEFAULT_TIMEOUT,
        wait_for_workers: bool = True,
        multi_tenant: bool = False,
        master_listen_fd: int | None = None,
        use_libuv: bool = True,
        *,
        auth_key: bytes | str | None = None,
    ) -> None:
        if not isinstance(host_name, str) or not host_name:
            raise ValueError(f"host_name must be a name or an address, not {host_name!r}")
        number = whole(port, "port")
        if not 0 <= number <= 65535 or (number == 0 and not is_master):
            raise ValueError(f"port must be 1 to 65535 (0 only on the master), not {number}")
        size = -1 if world_size is None else max(-1, whole(world_size, "world_size"))
        if size == 0:
            raise ValueError("TCPStore world size cannot be 0")
        deadline = Deadline(seconds_of(timeout))
        self._timeout = timedelta(seconds=deadline.seconds)
        self._peer = Peer(host_name, number, find_key(auth_key))
        if is_master:
            self._serve(size, multi_tenant, master_listen_fd, deadline)
        self._peer.connect(deadline)
        if size > 0 and wait_for_workers:
            self._join(size, is_master, deadline)

    # --- start -----------------------------------------------------------------------------------

    def _serve(self, size: int, shared: bool, listen_fd: int | None, deadline: Deadline) -> None:
        peer = self._peer
        with _servers_lock:
            known = _servers.get((peer.host, peer.port)) if shared and peer.port else None
            server = known() if known is not None else None
            if server is None or not server.stats():
                net.enough_descriptors(max(size, 0))
                if listen_fd is None:
                    sockets = net.listen(peer.host, peer.port, deadline)
                else:
                    sockets = net.adopt(whole(listen_fd, "master_listen_fd"), peer.port)
                peer.port = sockets[0].getsockname()[1]
                server = native.Server(
                    [sock.detach() for sock in sockets],
                    peer.key,
                    limit=config.get("store_limit"),
                    handshake=_HANDSHAKE,
                    message=_MESSAGE,
                    idle=_peer.idle_limit(),
                    connections=config.get("store_connections"),
                    strangers=_STRANGERS,
                    world_size=size,
                )
                if shared:
                    _servers[peer.host, peer.port] = weakref.ref(server)
        peer.server = server
        wild = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(peer.host, peer.host)
        peer.addresses = net.resolve(wild, peer.port, deadline)

    def _join(self, size: int, is_master: bool, deadline: Deadline) -> None:
        status, number, _ = self._ask("join", native.JOIN, (), size, deadline.left())
        if status == native.SIZES:
            raise DistStoreError(
                f"{self._peer}: this process says world_size={size}, the master said {number}"
            )
        if not is_master:
            return
        left = deadline.left()
        status, number, _ = self._ask("join", native.JOINED, (), size, left, int(left * 1e9))
        if status == native.LATE:
            raise StoreTimeoutError(
                f"Timed out after {deadline.seconds:g} seconds waiting for clients. "
                f"{number}/{size} clients joined. ({self._peer})"
            )

    # --- requests --------------------------------------------------------------------------------

    def _ask(
        self,
        what: str,
        op: int,
        items: tuple[str | bytes, ...],
        number: int = 0,
        seconds: float | None = None,
        wait_ns: int = 0,
    ) -> tuple[int, int, list[bytes]]:
        """Send a request and return the reply, or raise the connection's error."""
        if seconds is None:
            seconds = self._timeout.total_seconds()
        try:
            reply = self._peer.ask(op, items, number, wait_ns, seconds + _GRACE)
        except native.LinkError as error:
            self._broken(what, items, seconds, error)
        if reply[0] > native.LATE:
            self._refused(what, items, number, reply)
        return reply

    def _broken(
        self, what: str, items: tuple[str | bytes, ...], seconds: float, error: native.LinkError
    ) -> NoReturn:
        keys = [key_of(items[0])] if items else []
        if error.reason == "late":
            raise timed_out(
                what, seconds, keys, str(self._peer),
                "the server has not answered: its process is stopped or cut off, or the network is "
                "slow",
            ) from None  # fmt: skip
        if error.reason == "impostor":
            raise DistStoreError(
                f"{what}: a reply of the {self._peer} is not what its server sent; the connection "
                "is closed"
            ) from None
        reason = "it closed the connection"
        if error.reason == "system":
            reason = os.strerror(error.number)
        raise DistStoreError(
            f"{what} of {keys}: the {self._peer} is gone: {reason}. Its process has "
            "ended or was killed, and what was asked may or may not have been done"
        ) from None

    def _refused(
        self,
        what: str,
        items: tuple[str | bytes, ...],
        amount: int,
        reply: tuple[int, int, list[bytes]],
    ) -> None:
        status, number, values = reply
        where = f"({self._peer})"
        key = key_of(items[0]) if items else ""
        if status == native.NO_NUMBER:
            raise DistStoreError(
                f"add: the key {key} holds {values[0]!r}, which is not a whole number {where}"
            )
        if status == native.OVERFLOW:
            raise DistStoreError(
                f"add: {number} + {amount} of the key {key} leaves 64 bits {where}"
            )
        if status == native.FULL:
            raise DistStoreError(
                f"{what} of the key {key}: the store is full. Its limit is {number} bytes; "
                f"HPCDIST_STORE_LIMIT on the master raises it {where}"
            )
        if status == native.EMPTY:
            raise QueueEmptyError(f"the queue {key} is empty {where}")
        if status == native.SENSELESS:
            raise DistStoreError(f"{what}: the server does not understand the request {where}")

    def _await(
        self,
        what: str,
        op: int,
        items: tuple[str, ...],
        number: int = 0,
        timeout: Timeout | None = None,
    ) -> list[bytes]:
        """Send a request that waits on the server, which names what is missing at the timeout."""
        seconds = seconds_of(timeout) if timeout is not None else self._timeout.total_seconds()
        status, count, values = self._ask(what, op, items, number, seconds, int(seconds * 1e9))
        if status == native.LATE:
            names = [value.decode() for value in values]
            more = ""
            if op == native.BARRIER:
                names, more, count = [items[0]], f"{count}/{number} arrived", 1
            raise timed_out(what, seconds, names, str(self._peer), more, total=count)
        if status == native.SIZES:
            raise DistStoreError(
                f"barrier {items[0]}: this caller says world_size={number}, those that are in it "
                f"said {count} ({self._peer})"
            )
        return values

    # --- the methods of a store ------------------------------------------------------------------

    def set(self, key: str, value: Value) -> None:
        self._ask("set", native.SET, (key_of(key), value_of(value)))

    def get(self, key: str) -> bytes:
        return self._await("get", native.GET, (key_of(key),))[0]

    def add(self, key: str, value: int) -> int:
        return self._ask("add", native.ADD, (key_of(key),), whole(value, "the amount to add"))[1]

    def compare_set(self, key: str, expected_value: Value, desired_value: Value) -> bytes:
        items = (key_of(key), value_of(expected_value), value_of(desired_value))
        return self._ask("compare_set", native.EXCHANGE, items)[2][0]

    def check(self, keys: Sequence[str]) -> bool:
        return self._ask("check", native.CHECK, tuple(key_list(keys)))[1] == 1

    def wait(self, keys: Sequence[str], timeout: Timeout | None = None) -> None:
        self._await("wait", native.WAIT, tuple(key_list(keys)), 0, timeout)

    def delete_key(self, key: str) -> bool:
        return self._ask("delete_key", native.DELETE, (key_of(key),))[1] == 1

    def append(self, key: str, value: Value) -> None:
        self._ask("append", native.APPEND, (key_of(key), value_of(value)))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return self._await("multi_get", native.GET, tuple(key_list(keys)))

    def multi_set(self, keys: Sequence[str], values: Sequence[Value]) -> None:
        pairs = self._pairs(keys, values)
        self._ask("multi_set", native.SET, tuple(item for pair in pairs for item in pair))

    def queue_push(self, key: str, value: Value) -> None:
        self._ask("queue_push", native.PUSH, (key_of(key), value_of(value)))

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        return self._await("queue_pop", native.POP, (key_of(key),), int(bool(block)))[0]

    def queue_len(self, key: str) -> int:
        return self._ask("queue_len", native.LENGTH, (key_of(key),))[1]

    def barrier(self, key: str, world_size: int, timeout: Timeout | None = None) -> None:
        self._await(
            "barrier", native.BARRIER, (key_of(key),), self._barrier_size(world_size), timeout
        )

    def num_keys(self) -> int:
        return self._count_below("")

    def list_keys(self) -> list[str]:
        return self._keys_below("")

    def clone(self) -> TCPStore:
        twin = TCPStore.__new__(TCPStore)
        twin._peer = self._peer
        twin._timeout = self._timeout
        return twin

    @property
    def host(self) -> str:
        """Name or address of the master, as passed to the constructor."""
        return self._peer.host

    @property
    def port(self) -> int:
        """The port that the master listens on."""
        return self._peer.port

    def _keys_below(self, prefix: str) -> list[str]:
        values = self._ask("list_keys", native.LIST, (prefix,))[2]
        return sorted(value.decode() for value in values)

    def _count_below(self, prefix: str) -> int:
        return self._ask("num_keys", native.COUNT, (prefix,))[1]

    def _where(self) -> str:
        return str(self._peer)
