"""The requests that the server answers: the page, its data, and files of recorders."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import re
import secrets
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from aiohttp import web

from hpcdist.recordings.analysis import analysis, page, timeline

from .limits import Limits
from .metrics import exposition
from .nodes import Receiver
from .state import State, decoded

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
#: Seconds for which a sample is shown before the next one is made.
FRESH = 1.0
#: Seconds between two samples while no page is open.
_SELDOM = 10.0
#: Seconds between two questions for the same rank's stacks.
_APART = 2.0
_HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Server": "hpcdist",
}


class Site:
    """The server's answers.

    Parameters
    ----------
    state : State
        What they show.
    receiver : Receiver
        Where recorders of other nodes come from.
    token : str
        Every request must have it.
    """

    def __init__(self, state: State, receiver: Receiver, token: str) -> None:
        self._state, self._receiver = state, receiver
        self._token = hashlib.sha256(token.encode()).digest()
        # The browser keeps something that is worth nothing to another server with this token.
        self._cookie = secrets.token_urlsafe(24)
        self._lock = asyncio.Lock()  # of the state
        self._files = asyncio.Lock()  # of what other nodes send when they are asked
        self._sampled = 0.0
        self._looked = 0.0
        self._data: dict[str, Any] = {}
        self._asked: dict[int, float] = {}
        self.limits: Limits | None = None
        self.app = web.Application(middlewares=[self._admit], client_max_size=4096)
        for path, handler in (
            ("/", self.page),
            ("/state", self.state),
            ("/stacks/{rank:[0-9]{1,9}}", self.stacks),
            ("/metrics", self.metrics),
            ("/timeline", self.timeline),
            ("/recorder/{rank:[0-9]{1,9}}", self.recorder),
            ("/dump/{name}", self.dump),
        ):
            self.app.router.add_get(path, handler)

    # ---- who may ask ----

    @web.middleware
    async def _admit(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        """Refuse requests without the token before looking at anything else of them."""
        transport = request.transport
        if self.limits:
            self.limits.begin(transport)
        try:
            if not self._may(request):
                answer: web.StreamResponse = web.Response(
                    status=401,
                    text="This server needs its token: open the address that it was started with, "
                    "or send the header 'Authorization: Bearer TOKEN'.\n",
                    headers={"WWW-Authenticate": "Bearer"},
                )
                answer.force_close()
            else:
                answer = await handler(request)
        except web.HTTPException as error:
            answer = error
        finally:
            if self.limits:
                self.limits.end(transport)
        for name, value in _HEADERS.items():
            answer.headers.setdefault(name, value)
        return answer

    def _may(self, request: web.Request) -> bool:
        kind, _, given = request.headers.get("Authorization", "").partition(" ")
        if kind.lower() == "bearer":
            return self._is_token(given.strip())
        if "token" in request.query and request.path == "/":
            return self._is_token(request.query["token"])
        cookie = request.cookies.get(self._cookie_name(request), "")
        return hmac.compare_digest(cookie.encode(), self._cookie.encode())

    def _is_token(self, given: str) -> bool:
        # of digests: a comparison of texts would show their length
        digest = hashlib.sha256(given.encode(errors="replace")).digest()
        return hmac.compare_digest(digest, self._token)

    @staticmethod
    def _cookie_name(request: web.Request) -> str:
        """Cookies belong to a host, and two servers may run on one: so its port is in the name."""
        name = request.transport.get_extra_info("sockname") if request.transport else None
        return f"hpcdist-{name[1] if name else 0}"

    # ---- answers ----

    async def page(self, request: web.Request) -> web.StreamResponse:
        """The page; the token in its address becomes a cookie."""
        if "token" in request.query:
            moved = web.Response(status=303, headers={"Location": "/"})
            moved.set_cookie(
                self._cookie_name(request), self._cookie, httponly=True, samesite="Strict"
            )
            return moved
        form = (Path(__file__).parent / "page.html").read_text(encoding="utf-8")
        nonce = secrets.token_urlsafe(16)
        return web.Response(
            text=form.replace("@NONCE@", nonce),
            content_type="text/html",
            headers={
                "Content-Security-Policy": "default-src 'none'; connect-src 'self'; img-src data:; "
                f"script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; base-uri 'none'; "
                "form-action 'none'; frame-ancestors 'none'"
            },
        )

    async def state(self, request: web.Request) -> web.StreamResponse:
        """What the page shows."""
        self._looked = time.monotonic()
        return web.json_response(await self.sample())

    async def stacks(self, request: web.Request) -> web.StreamResponse:
        """Ask a rank for its stacks, and answer with those that are there."""
        rank = int(request.match_info["rank"])
        rows = {row["rank"]: row for row in (await self.sample())["rows"]}
        if rank not in rows:
            raise web.HTTPNotFound(text=f"no rank {rank}\n")
        now = time.monotonic()
        if now - self._asked.get(rank, -_APART) >= _APART:
            self._asked[rank] = now
            if rank in await asyncio.to_thread(self._state.node.ranks):
                async with self._lock:
                    await asyncio.to_thread(self._state.node.stacks, [rank], True)
            else:
                self._state.wanted.add(rank)
                await asyncio.sleep(2.5)  # the node's next report, and the one after its question
            self._sampled = 0.0
            rows = {row["rank"]: row for row in (await self.sample())["rows"]}
        row = rows.get(rank, {})
        return web.json_response(
            {"rank": rank, "stacks": row.get("stacks", ""), "age": row.get("stacks_age")}
        )

    async def metrics(self, request: web.Request) -> web.StreamResponse:
        """The state in Prometheus's form."""
        text = exposition(await self.sample())
        return web.Response(
            body=text, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        )

    async def timeline(self, request: web.Request) -> web.StreamResponse:
        """The analysis of all recorders, as ``python -m hpcdist analyze`` makes it."""
        async with self._files:
            others = await self._receiver.all_files() if self._state.reports else {}
            text = await asyncio.to_thread(self._analyze, others)
        return web.Response(text=text, content_type="text/html", headers=_own_scripts(text))

    def _analyze(self, others: dict[int, bytes]) -> str:
        with tempfile.TemporaryDirectory() as folder:
            recordings = decoded(others, Path(folder)) + self._state.node.recordings(None)
        if not recordings:
            return "<!DOCTYPE html><title>hpcdist</title>No rank of the job is there any more."
        recordings.sort(key=lambda one: one.rank)
        return page(analysis(recordings), timeline(recordings))

    async def recorder(self, request: web.Request) -> web.StreamResponse:
        """A rank's recorder, for ``python -m hpcdist analyze``."""
        rank = int(request.match_info["rank"])
        async with self._files:
            data = await asyncio.to_thread(self._state.node.file, rank)
            if not data and self._state.reports:
                data = (await self._receiver.all_files()).get(rank, b"")
        if not data:
            raise web.HTTPNotFound(text=f"no recorder of rank {rank}\n")
        return _file(f"{self._state.job}-rank{rank}.hpcdist", data)

    async def dump(self, request: web.Request) -> web.StreamResponse:
        """A copy in the folder HPCDIST_DUMP: one of those that the page lists, by its name."""
        path = self._state.dump_files().get(request.match_info["name"])
        if path is None:
            raise web.HTTPNotFound(text="no such copy\n")
        return _file(path.name, await asyncio.to_thread(path.read_bytes))

    # ---- samples ----

    async def sample(self) -> dict[str, Any]:
        """Return the state; however many ask, it is sampled once a second."""
        async with self._lock:
            if time.monotonic() - self._sampled >= FRESH:
                self._data = await asyncio.to_thread(self._state.sample)
                self._sampled = time.monotonic()
            return self._data

    async def keep_sampling(self) -> None:
        """Keep the history up to date: every second while a page is open, else seldom."""
        while True:
            watched = time.monotonic() - self._looked < 3 * _SELDOM
            await self.sample()
            await asyncio.sleep(FRESH if watched else _SELDOM)


def _file(name: str, data: bytes) -> web.Response:
    return web.Response(
        body=data,
        content_type="application/octet-stream",
        headers={"Content-Disposition": f'attachment; filename="{name}"'},
    )


def _own_scripts(text: str) -> dict[str, str]:
    """Let the page's own script run, and nothing that a name in it might bring."""
    scripts = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    digests = [hashlib.sha256(script.encode()).digest() for script in scripts]
    allowed = [f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests] or ["'none'"]
    return {
        "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; "
        f"script-src {' '.join(allowed)}; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    }
