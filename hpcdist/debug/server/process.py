"""The server's own process. It reads its orders from standard input, and ends with its rank.

The first line of its output says, as JSON, where it listens or why it cannot.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from typing import Any

from aiohttp import web

from .limits import Limits
from .nodes import ROOM, Receiver, report
from .state import Node, State
from .web import Site

#: Bytes of a request for the page: its head, there is no body.
_HEAD = 32 << 10
#: The server takes what the ranks leave of the cores.
_NICE = 19


def main() -> int:
    """Run until the rank that started this process ends."""
    parent = os.getppid()
    orders = json.loads(sys.stdin.buffer.readline())
    try:
        asyncio.run(_run(orders, parent))
    except (OSError, OverflowError) as error:
        say(error=str(error))
        return 1
    return 0


def say(**what: Any) -> None:
    """Tell the rank one thing, the only one; from now on there is nothing to read here."""
    print(json.dumps(what), flush=True)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    os.close(null)
    os.nice(_NICE)


async def _run(orders: dict[str, Any], parent: int) -> None:
    node = Node(orders["files"])
    serve = _report if "first_node" in orders else _serve
    work = asyncio.ensure_future(serve(node, orders))
    await asyncio.wait([work, asyncio.ensure_future(_end(parent))], return_when="FIRST_COMPLETED")
    if work.done():
        work.result()


async def _end(parent: int) -> None:
    """Return when standard input ends, or the rank: a child that it forked keeps the pipe open."""
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(0, lambda: None if os.read(0, 4096) else ended.set())
    while not ended.is_set() and os.getppid() == parent:
        try:
            await asyncio.wait_for(ended.wait(), 0.5)
        except asyncio.TimeoutError:
            continue
    loop.remove_reader(0)


async def _serve(node: Node, orders: dict[str, Any]) -> None:
    state = State(node, orders["dumps"])
    receiver = Receiver(state, bytes.fromhex(orders["key"]))
    site = Site(state, receiver, orders["token"])
    port, site.limits = await _listen(site.app, orders["host"], orders["port"], _HEAD)
    taken = 0
    if orders["others"]:
        app = web.Application(client_max_size=ROOM)
        app.router.add_post("/", receiver.take)
        taken, _ = await _listen(app, None, orders["worker_port"], ROOM + _HEAD)
    await site.sample()
    say(port=port, worker_port=taken)
    await site.keep_sampling()


async def _listen(
    app: web.Application, host: str | None, port: int, room: int
) -> tuple[int, Limits]:
    """Listen, at all addresses if `host` is None; the port, and the bounds of its connections."""
    runner = web.AppRunner(
        app,
        access_log=None,
        handle_signals=False,
        keepalive_timeout=15.0,
        lingering_time=0.0,
    )
    await runner.setup()
    assert runner.server is not None
    limits = Limits(runner.server, room)
    loop = asyncio.get_running_loop()
    if host is None and socket.has_dualstack_ipv6():
        # one socket for both: any free port would be another one for each
        both = socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        listening = await loop.create_server(limits, sock=both, backlog=64)
    else:
        listening = await loop.create_server(limits, host, port, backlog=64)
    bound: int = listening.sockets[0].getsockname()[1]
    return bound, limits


async def _report(node: Node, orders: dict[str, Any]) -> None:
    first_node = orders["first_node"]

    def ready(why: str) -> None:
        if why:
            say(error=why)
        else:
            say(port=0, worker_port=0)

    await report(
        node, bytes.fromhex(orders["key"]), first_node["addresses"], first_node["port"], ready
    )
