"""Headless Chromium, driven through its DevTools protocol: no driver or library is needed."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import shutil
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import ClientSession, ClientWebSocketResponse, WSMsgType

__all__ = ["Tab", "find", "tab"]

_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


def find() -> str | None:
    """Return the browser's path."""
    return next(filter(None, map(shutil.which, _NAMES)), None)


class Tab:
    """One page. `problems` has what it wrote to the console as an error, and its exceptions."""

    def __init__(self, socket: ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.problems: list[str] = []
        self._reading = asyncio.ensure_future(self._read())

    async def _read(self) -> None:
        async for message in self._socket:
            if message.type is not WSMsgType.TEXT:
                break
            told = message.json()
            if "id" in told:
                self._answers.pop(told["id"]).set_result(told)
            elif told["method"] == "Runtime.exceptionThrown":
                self.problems.append(str(told["params"]["exceptionDetails"]))
            elif told["method"] == "Log.entryAdded" and told["params"]["entry"]["level"] == "error":
                self.problems.append(told["params"]["entry"]["text"])

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol."""
        number = next(self._numbers)
        self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        told = await asyncio.wait_for(self._answers[number], 20.0)
        assert "error" not in told, (method, told)
        return dict(told["result"])

    async def open(self, address: str) -> None:
        """Go to an address."""
        await self.call("Page.navigate", url=address)

    async def evaluate(self, script: str) -> Any:
        """Return what a script is."""
        told = await self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in told, told
        return told["result"].get("value")

    async def until(self, script: str, seconds: float = 20.0) -> Any:
        """Wait until a script is true, and return what it is."""
        end = time.monotonic() + seconds
        while not (found := await self.evaluate(script)):
            assert time.monotonic() < end, (script, await self.text())
            await asyncio.sleep(0.1)
        return found

    async def text(self) -> str:
        """Return what a person reads."""
        return str(await self.evaluate("document.body ? document.body.innerText : ''"))

    async def picture(self, path: Path, width: int = 1200, height: int = 900) -> None:
        """Write a picture of the page."""
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=False,
        )  # fmt: skip
        await asyncio.sleep(1.5)
        told = await self.call("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(told["data"]))


@asynccontextmanager
async def tab() -> AsyncIterator[Tab]:
    """Start the browser with an empty page, and end it."""
    program = find()
    assert program, "no Chromium: see CONTRIBUTING.md"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        process = subprocess.Popen(
            [program, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
             "--remote-debugging-port=0", f"--user-data-dir={folder}", "--no-first-run",
             "--window-size=1200,900", "about:blank"],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            port = await _port(Path(folder) / "DevToolsActivePort")
            async with ClientSession() as session:
                async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                    pages = [p for p in await answer.json() if p["type"] == "page"]
                async with session.ws_connect(
                    pages[0]["webSocketDebuggerUrl"], max_msg_size=1 << 28
                ) as socket:
                    made = Tab(socket)
                    for domain in ("Page", "Runtime", "Log"):
                        await made.call(f"{domain}.enable")
                    yield made
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()


async def _port(file: Path) -> int:
    end = time.monotonic() + 30
    while time.monotonic() < end:
        with contextlib.suppress(OSError, ValueError, IndexError):
            return int(file.read_text().split()[0])
        await asyncio.sleep(0.1)
    raise AssertionError("the browser has not started")
