"""Reports of other nodes to the debug server."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families

from hpcdist.debug.server import nodes
from hpcdist.debug.server.metrics import exposition
from hpcdist.debug.server.nodes import Receiver, report
from hpcdist.debug.server.state import Node, State

pytestmark = [pytest.mark.local, pytest.mark.any_mpi]

KEY = b"a key of the test"


class Container(Node):
    """A node with one rank, in a container whose name others have, too."""

    def __init__(self, rank):
        super().__init__([])
        self.name = "worker"
        self.rank = rank

    def look(self):
        row = {
            "rank": self.rank, "operations": 0, "bytes": {}, "names": {}, "inside": False,
            "size": 3, "waits": False, "spares": 0, "deaths": 0, "recoveries": 0, "recovering": 0.0,
            "recovered": None, "alive": True, "job": "0a0b0c0d", "program": "p", "host": self.name,
            "calls": [], "groups": {}, "reached": {}, "open": [], "silent": 0.0, "operation": "",
            "seconds": 0.0, "state": "", "pid": 1, "resident": 0, "resident_most": 0,
        }  # fmt: skip
        return {**super().look(), "rows": [row]}

    def files(self):
        return {self.rank: b"%d" % self.rank}


async def gathered(seconds=10.0):
    """The state of three containers, and their files, at the node of rank 0."""
    state = State(Container(0), "")
    receiver = Receiver(state, KEY)
    app = web.Application()
    app.router.add_post("/", receiver.take)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    said = []
    others = [
        asyncio.ensure_future(report(Container(rank), KEY, ["127.0.0.1"], port, said.append))
        for rank in (1, 2)
    ]
    try:
        while len(said) < 2:
            await asyncio.sleep(0.02)
        files = await receiver.all_files(seconds)
        return state.sample(), files, said
    finally:
        for other in others:
            other.cancel()
        await runner.cleanup()


def test_nodes_of_one_name(monkeypatch):
    """Containers of several machines: their reports took the place of each other's."""
    monkeypatch.setattr(nodes, "EVERY", 0.05)
    state, files, said = asyncio.run(asyncio.wait_for(gathered(), 30))
    assert said == ["", ""]
    assert [row["rank"] for row in state["rows"]] == [0, 1, 2]
    assert [one["node"] for one in state["nodes"]] == ["worker", "worker (2)", "worker (3)"]
    assert files == {1: b"1", 2: b"2"}
    text = exposition(state).decode()
    families = {one.name: one for one in text_string_to_metric_families(text)}
    ages = families["hpcdist_node_report_age_seconds"].samples
    assert len({one.labels["node"] for one in ages}) == len(ages) == 3


def test_a_clock_that_is_set_back(monkeypatch):
    """The files of a later report come all the same."""
    clock = iter(range(10**9, 0, -1))
    monkeypatch.setattr(nodes, "EVERY", 0.05)
    monkeypatch.setattr(nodes.time, "time_ns", lambda: next(clock))
    _, files, _ = asyncio.run(asyncio.wait_for(gathered(3.0), 30))
    assert files == {1: b"1", 2: b"2"}
