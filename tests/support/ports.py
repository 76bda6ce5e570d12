"""Ports for servers that start later."""

from __future__ import annotations

import random
import socket
from contextlib import suppress
from pathlib import Path

_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port() -> int:
    """Return a port of this machine, for IPv4 and IPv6, that nobody uses.

    It is none of those that the kernel chooses from, unless these are nearly all: a connection of
    any other process could have it before the server does, or the client's own to the server that
    is not there yet.
    """
    first = int(_RANGE.read_text().split()[0])
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    for _ in range(1000):
        port = random.randrange(10_000, first) if first > 11_000 else 0
        with suppress(OSError):
            with socket.create_server(("", port), family=family, dualstack_ipv6=both) as server:
                return int(server.getsockname()[1])
    raise OSError("no port is free")
