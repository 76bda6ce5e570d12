"""Sockets of a TCPStore: names to addresses, listening, connecting. Never the other way round.

No address is ever turned into a name: with a slow name server that takes seconds a connection.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import resource
import socket
import threading
from collections.abc import Sequence
from typing import Any

from hpcdist.errors import DistNetworkError, StoreTimeoutError
from hpcdist.log import get_logger

from ._common import Deadline

#: Family and address, as getaddrinfo gives them.
Address = tuple[int, Any]

_BACKLOG = 4096
_ATTEMPTS = 8
#: Descriptors that are left for everything else in the process.
_SPARE = 256
_log = get_logger("store")


def resolve(host: str, port: int, deadline: Deadline) -> list[Address]:
    """Return the addresses of a host, within a deadline even if the name server is slow.

    Parameters
    ----------
    host : str
        A name, or an IPv4 or IPv6 address.
    port : int
        The port of the addresses.
    deadline : Deadline
        Until when.

    Returns
    -------
    list of (family, address)
        Without repetitions, in the system's order of preference.

    Raises
    ------
    DistNetworkError
        If the name is not known.
    StoreTimeoutError
        If the name server did not answer in time.
    """

    def ask(flags: int) -> list[Address]:
        found = socket.getaddrinfo(host, port, 0, socket.SOCK_STREAM, 0, flags)
        return list(dict.fromkeys((int(family), address) for family, _, _, _, address in found))

    try:
        return ask(socket.AI_NUMERICHOST)
    except socket.gaierror:
        pass
    except UnicodeError as error:  # two dots in a row, or more letters than a name may have
        raise DistNetworkError(f"the host {host} is not known: it cannot be a name") from error
    answer: list[Any] = []

    def look_up() -> None:
        try:
            answer.append(ask(0))
        except OSError as error:
            answer.append(error)

    # getaddrinfo has no deadline
    thread = threading.Thread(target=look_up, name=f"resolve {host}", daemon=True)
    thread.start()
    thread.join(deadline.left())
    if not answer:
        raise StoreTimeoutError(
            f"the name server did not answer for the host {host} within "
            f"{round(deadline.seconds * 1000)}ms; give its address instead"
        )
    if isinstance(answer[0], OSError):
        raise DistNetworkError(f"the host {host} is not known: {answer[0].strerror}")
    return answer[0]


def _prepare(sock: socket.socket) -> None:
    """Set options that accepted connections inherit: no delay, and detection of vanished peers."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 15)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 120_000)


def _listen_one(family: int, address: Any, port: int) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            # "::" means all addresses; any other means only itself
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(address[0] != "::"))
        _prepare(sock)
        sock.bind((address[0], port, *address[2:]))
        sock.listen(_BACKLOG)
    except BaseException:
        sock.close()
        raise
    return sock


def _listen_all(addresses: Sequence[Address], port: int) -> list[socket.socket]:
    """Listen on each address of this machine that a name resolves to, all on one port."""
    made: list[socket.socket] = []
    absent: OSError | None = None
    try:
        for family, address in addresses:
            try:
                made.append(_listen_one(family, address, port))
            except OSError as error:
                if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    raise
                absent = error
                continue
            port = made[0].getsockname()[1]
    except BaseException:
        for sock in made:
            sock.close()
        raise
    if not made and absent is not None:
        raise absent
    return made


def listen(host: str, port: int, deadline: Deadline) -> list[socket.socket]:
    """Listen on the given address only.

    Parameters
    ----------
    host : str
        A name or address of this machine; ``0.0.0.0`` or ``::`` for all of them.
    port : int
        0 picks a free one.
    deadline : Deadline
        For the name server.

    Returns
    -------
    list of socket.socket
        One for each address of the name, all on the same port.

    Raises
    ------
    DistNetworkError
        At once, if the port is in use or the host is not this machine.
    """
    addresses = resolve(host, port, deadline)
    for attempt in range(_ATTEMPTS):
        try:
            made = _listen_all(addresses, port)
        except OSError as error:
            # a free port of the first address may be taken on the second
            if port == 0 and error.errno == errno.EADDRINUSE and attempt + 1 < _ATTEMPTS:
                continue
            raise DistNetworkError(_why_not(host, port, error)) from error
        _warn_of_loopback(host, made)
        return made
    raise AssertionError("not reached")


def _why_not(host: str, port: int, error: OSError) -> str:
    name = errno.errorcode.get(error.errno or 0, "?")
    hint = ""
    if error.errno == errno.EADDRINUSE:
        hint = ". Another process listens there: choose another port, or 0 for a free one"
    elif error.errno == errno.EADDRNOTAVAIL:
        hint = f". {host} is not an address of this machine: the master has to run there"
    elif error.errno == errno.EACCES:
        hint = ". Ports below 1024 are for root"
    return (
        "The server socket has failed to listen on any local network address. "
        f"host: {host}, port: {port}, {name}: {error.strerror}{hint}"
    )


def _warn_of_loopback(host: str, made: Sequence[socket.socket]) -> None:
    """Warn if /etc/hosts maps this machine's name to an address that others cannot reach."""
    try:
        ipaddress.ip_address(host.partition("%")[0])
        return
    except ValueError:
        pass
    own = [sock.getsockname()[0].partition("%")[0] for sock in made]
    if host != "localhost" and all(ipaddress.ip_address(address).is_loopback for address in own):
        _log.warning(
            "TCPStore: on this machine the name %s resolves to %s, so others cannot connect. "
            "Pass an address of its network, or 0.0.0.0 for all",
            host,
            own[0],
        )


def adopt(fd: int, port: int) -> list[socket.socket]:
    """Take a listening socket over from the caller.

    Parameters
    ----------
    fd : int
        A bound TCP socket. A duplicate is used, so the caller's may be closed or kept.
    port : int
        The port it must be bound to; 0 for any.

    Returns
    -------
    list of socket.socket
        The one.

    Raises
    ------
    DistNetworkError
        If it is no such socket, or bound to another port.
    """
    try:
        sock = socket.socket(fileno=os.dup(fd))
    except OSError as error:
        raise DistNetworkError(f"master_listen_fd={fd} is no socket: {error.strerror}") from error
    try:
        if sock.family not in (socket.AF_INET, socket.AF_INET6) or not (
            sock.type & socket.SOCK_STREAM
        ):
            raise DistNetworkError(f"master_listen_fd={fd} is not a TCP socket")
        bound = sock.getsockname()[1]
        if not bound or port not in (0, bound):
            raise DistNetworkError(
                f"master_listen_fd={fd} is bound to port {bound}, and port={port} was given"
            )
        _prepare(sock)
        sock.listen(_BACKLOG)
    except BaseException:
        sock.close()
        raise
    return [sock]


def connect(addresses: Sequence[Address], seconds: float) -> socket.socket:
    """Connect to the first address that answers.

    Parameters
    ----------
    addresses : sequence of (family, address)
        To be tried in order.
    seconds : float
        For all of them.

    Returns
    -------
    socket.socket
        Blocking.

    Raises
    ------
    OSError
        From the last address, if none answers.
    """
    deadline = Deadline(seconds)
    failure: OSError = TimeoutError(errno.ETIMEDOUT, "timed out")
    for number, (family, address) in enumerate(addresses):
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            # an address that never answers must leave time for the others
            sock.settimeout(max(0.001, deadline.left() / (len(addresses) - number)))
            sock.connect(address)
            if sock.getsockname() == sock.getpeername():
                # the kernel gave this end the very port it connects to: it met itself
                raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
            _prepare(sock)
            sock.settimeout(None)
            return sock
        except BaseException as error:
            sock.close()
            if not isinstance(error, OSError):
                raise
            failure = error
    raise failure


def enough_descriptors(wanted: int) -> None:
    """Raise the soft limit of open files if a server of this many clients needs it.

    Parameters
    ----------
    wanted : int
        Number of expected connections.

    Raises
    ------
    DistNetworkError
        If the hard limit is too low.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + _SPARE
    if soft == resource.RLIM_INFINITY or needed <= soft:
        return
    if hard != resource.RLIM_INFINITY and needed > hard:
        raise DistNetworkError(
            f"TCPStore: a server of {wanted} clients needs {needed} open files, and the hard limit "
            f"is {hard}: raise it (ulimit -Hn, or LimitNOFILE of the service that starts jobs)"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
