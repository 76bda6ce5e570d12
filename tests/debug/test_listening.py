"""Where the debug server listens."""

from __future__ import annotations

import asyncio
import socket

import pytest
from aiohttp import web

from hpcdist.debug.server.process import _listen

pytestmark = [pytest.mark.local, pytest.mark.any_mpi]


def test_any_free_port_is_the_same_for_both_families():
    hosts = ["127.0.0.1", "::1"] if socket.has_dualstack_ipv6() else ["127.0.0.1"]

    async def connect() -> None:
        port, _ = await _listen(web.Application(), None, 0, 1000)
        for host in hosts:
            _, writer = await asyncio.open_connection(host, port)
            writer.close()

    asyncio.run(asyncio.wait_for(connect(), 20))
