"""Reports of other nodes: a process there sends what it sees; the answer says what is wanted.

Every report and answer is signed with a key that the ranks got from rank 0 over MPI, and each
report's number must be larger than that of the node's last one, so none can be sent again. A node
goes by the random id of its process, not by its name.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import time
import zlib
from typing import Any

from aiohttp import ClientError, ClientSession, ClientTimeout, web

from .state import Node, State

#: Bytes of a report, compressed and not.
ROOM, LARGEST = 64 << 20, 512 << 20
#: Seconds between two reports.
EVERY = 1.0
#: Seconds in which the first rank's node must be reached.
_REACHED = 20.0


def _sign(key: bytes, what: str, turn: int, body: bytes) -> str:
    return hmac.new(key, f"{what} {turn} ".encode() + body, hashlib.sha256).hexdigest()


class Receiver:
    """Takes the reports of other nodes.

    Parameters
    ----------
    state : State
        Gets them.
    key : bytes
        Of the job.
    """

    def __init__(self, state: State, key: bytes) -> None:
        self._state = state
        self._key = key
        self._turns: dict[str, int] = {}
        self.files: dict[str, dict[int, bytes]] = {}
        self.collect: set[str] = set()  # ids of nodes whose files are wanted

    async def take(self, request: web.Request) -> web.Response:
        """Take one report."""
        try:
            turn = int(request.headers.get("X-Turn", "0"))
        except ValueError:
            turn = 0
        body = await request.read()
        signature = request.headers.get("X-Signature", "")
        wanted = _sign(self._key, "report", turn, body)
        if not hmac.compare_digest(signature.encode(), wanted.encode()):
            raise web.HTTPForbidden(text="the report is not signed with the job's key\n")
        told = json.loads(_unpacked(body))
        node = told["look"]["id"]
        if turn <= self._turns.get(node, 0):
            raise web.HTTPConflict(text="the report is an old one\n")
        self._turns[node] = turn
        self._state.reports[node] = (time.time(), told["look"])
        if "files" in told:
            self.files[node] = {int(r): base64.b64decode(f) for r, f in told["files"].items()}
            self.collect.discard(node)
        ranks = {row["rank"] for row in told["look"]["rows"]}
        wants = {"stacks": sorted(self._state.wanted & ranks), "files": node in self.collect}
        self._state.wanted -= ranks
        answer = json.dumps(wants).encode()
        return web.Response(
            body=answer, headers={"X-Signature": _sign(self._key, "answer", turn, answer)}
        )

    async def all_files(self, patience: float = 10.0) -> dict[int, bytes]:
        """Return the recorders of the ranks of other nodes, by rank."""
        self.files.clear()
        self.collect = set(self._state.reports)
        until = time.monotonic() + patience
        while self.collect and time.monotonic() < until:
            await asyncio.sleep(0.1)
        return {rank: data for files in self.files.values() for rank, data in files.items()}


def _unpacked(body: bytes) -> bytes:
    stream = zlib.decompressobj()
    data = stream.decompress(body, LARGEST)
    if stream.unconsumed_tail:
        raise web.HTTPRequestEntityTooLarge(LARGEST, len(data))
    return data


async def report(node: Node, key: bytes, addresses: list[str], port: int, ready: Any) -> None:
    """Send reports until this process ends.

    Parameters
    ----------
    node : Node
        This node.
    key : bytes
        Of the job.
    addresses : list of str
        Of the node that takes the reports: the first one that answers counts.
    port : int
        Its port.
    ready : callable
        Called with an empty text after the first report, or with the reason why there is none.
    """
    address, wants, turn = "", dict[str, Any](), 0
    began, why = time.monotonic(), "no answer"
    async with ClientSession(timeout=ClientTimeout(total=10.0)) as session:
        while True:
            what = await asyncio.to_thread(_look, node, wants)
            for place in [address] if address else addresses:
                try:
                    turn += 1  # a clock may be set back
                    url = f"http://{_quoted(place)}:{port}/"
                    wants = await _send(session, url, key, turn, what)
                    if not address:
                        ready("")
                    address = place
                    break
                except (ClientError, OSError, ValueError, asyncio.TimeoutError) as error:
                    why = f"{place}: {error or type(error).__name__}"
            if not address and time.monotonic() - began > _REACHED:
                ready(why)
                return
            await asyncio.sleep(0.0 if wants.get("files") or wants.get("stacks") else EVERY)


def _look(node: Node, wants: dict[str, Any]) -> bytes:
    if wants.get("stacks"):
        node.stacks(wants["stacks"], native=True)
    told: dict[str, Any] = {"look": node.look()}
    if wants.get("files"):
        files = node.files()
        told["files"] = {rank: base64.b64encode(data).decode() for rank, data in files.items()}
    return zlib.compress(json.dumps(told).encode(), 1)


async def _send(
    session: ClientSession, url: str, key: bytes, turn: int, body: bytes
) -> dict[str, Any]:
    headers = {"X-Turn": str(turn), "X-Signature": _sign(key, "report", turn, body)}
    async with session.post(url, data=body, headers=headers, allow_redirects=False) as answer:
        text = await answer.read()
        signature = _sign(key, "answer", turn, text)
        if not hmac.compare_digest(answer.headers.get("X-Signature", ""), signature):
            raise ValueError(f"an answer that is not signed, status {answer.status}")
    wants: dict[str, Any] = json.loads(text)
    return wants


def _quoted(address: str) -> str:
    return f"[{address}]" if ":" in address else address
