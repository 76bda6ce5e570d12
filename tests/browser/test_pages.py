"""The debug server's page and that of ``analyze`` in Chromium, with a job that hangs on purpose.

python -m pytest tests/browser
python -m pytest tests/browser --pictures docs/images     also writes the pictures of the docs
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from browser import Tab, tab
from jobs import mpirun_command

pytestmark = pytest.mark.by_hand

PROGRAM = Path(__file__).parents[1] / "debug" / "served.py"
TOKEN = "a-token-of-the-test"
LINES = PROGRAM.read_text().splitlines()
SECONDS = 45


def line_of(mark: str) -> int:
    return next(n for n, line in enumerate(LINES, 1) if line.endswith(f"# {mark}"))


@pytest.fixture(scope="module")
def address():
    """A job of three ranks that works for a while; then rank 1 hangs."""
    command, full = mpirun_command(3)
    job = subprocess.Popen(
        [*command, sys.executable, str(PROGRAM), "both", str(SECONDS)], env=full, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        assert job.stdout
        for line in job.stdout:
            if line.startswith("pid "):
                yield line.split()[3]
                break
    finally:
        job.kill()
        job.wait()


@pytest.fixture
def pictures(request) -> Callable[[Tab, str, int], Awaitable[None]]:
    folder = request.config.getoption("--pictures")

    async def picture(page: Tab, name: str, height: int) -> None:
        if folder:
            await page.picture(Path(folder) / name, 1100, height)

    return picture


async def look_at_the_page(page: Tab, address: str, picture) -> None:
    await page.open(address)
    await page.until("document.querySelectorAll('#ranks tbody tr').length === 3")
    assert await page.evaluate("location.search") == ""  # the token is not in the history
    # it works at first: the rates are drawn
    await page.until("state && state.history.length > 5 && state.rows.every(r => r.call_rate > 0)")
    drawn = "(() => { const c = document.getElementById('{}'); return c.getContext('2d')" \
        ".getImageData(0, 0, c.width, c.height).data.some(x => x); })()"  # fmt: skip
    for name in ("calls", "bytes", "sizes"):
        assert await page.evaluate(drawn.replace("{}", name)), name
    assert await page.evaluate("document.querySelectorAll('#slow tbody tr').length") == 3
    # then it hangs
    await page.until(f"document.body.innerText.includes('served.py:{line_of('hung: hang')} in')")
    text = await page.evaluate("document.querySelector('.hang').innerText")
    assert "rank 1 has not called it" in text and "barrier #" in text
    assert f"served.py:{line_of('here: hang')} in hang" in text, text
    assert f"rank 1: is at debug/served.py:{line_of('hung: hang')} in hang" in text, text
    kinds = await page.evaluate("[...document.querySelectorAll('#cells i')].map(c => c.className)")
    assert kinds == ["late", "missing", "late"]
    first = await page.evaluate("document.querySelector('#ranks tbody tr').innerText")
    assert first.split()[0] == "1"  # the rank that the others wait for is the first
    await picture(page, "debug-server.png", 860)
    await page.evaluate("document.querySelectorAll('#cells i')[1].click()")
    await page.until("document.getElementById('stacktext').innerText.includes('native')")
    assert f"line {line_of('hung: hang')} in hang" in await page.text()
    await page.evaluate(
        "document.getElementById('filter').value = '2';"
        "document.getElementById('filter').dispatchEvent(new Event('input'))"
    )
    assert await page.evaluate("document.querySelectorAll('#ranks tbody tr').length") == 1


async def look_at_the_analysis(page: Tab, address: str, picture) -> None:
    await page.open(address.split("/?")[0] + "/timeline")
    await page.until("document.querySelectorAll('#key span').length >= 3")
    text = await page.text()
    assert "First divergence: collective #" in text and "rank 1: has not called it" in text
    shown = (
        "(() => { const box = canvas.getBoundingClientRect(); canvas.dispatchEvent(new MouseEvent("
        "'mousemove', {clientX: box.left + box.width - 20, clientY: box.top + 30, bubbles: true}));"
        "return tip.style.display + tip.textContent; })()"
    )
    assert "blockrank 0: barrier" in await page.evaluate(shown)
    await page.evaluate("canvas.dispatchEvent(new MouseEvent('mouseleave'))")
    before = await page.evaluate("from + ' ' + to")
    zoom = "new WheelEvent('wheel', {deltaY: -100, clientX: 300, cancelable: true})"
    await page.evaluate(f"canvas.dispatchEvent({zoom})")
    assert await page.evaluate("from + ' ' + to") != before
    await page.evaluate("canvas.dispatchEvent(new MouseEvent('dblclick'))")
    assert await page.evaluate("from + ' ' + to") == before
    await picture(page, "analyze.png", 620)


def test_pages(address, pictures):
    async def all_() -> None:
        async with tab() as page:
            await page.open(address.replace(TOKEN, "another-token"))
            await page.until("document.body.innerText.includes('needs its token')")
            page.problems.clear()  # that was an error of its own
            await look_at_the_page(page, address, pictures)
            await look_at_the_analysis(page, address, pictures)
            assert not page.problems, page.problems

    asyncio.run(all_())
