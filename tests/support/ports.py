"""Ports for servers that start later."""

from __future__ import annotations

import random
import socket
from pathlib import Path

_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port() -> int:
    """Return a port of this machine, for IPv4 and IPv6, that nobody uses.

    It is none of those that the kernel chooses from: a connection of any other process could have
    it before the server does, or the client's own to the server that is not there yet.
    """
    first = int(_RANGE.read_text().split()[0])
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    while True:
        port = random.randrange(min(10_000, first - 1000), first)
        try:
            socket.create_server(("", port), family=family, dualstack_ipv6=both).close()
        except OSError:
            continue
        return port
