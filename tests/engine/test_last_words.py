"""What a process writes before it aborts the job must be read before the launcher goes down."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

pytestmark = pytest.mark.local

PROGRAM = """
import sys
from hpcdist import _engine
sys.stdin.readline()
_engine.abort(3, "last words")
"""


def abort(reader_waits: float) -> tuple[int | None, int, str, float]:
    """Abort a process whose reader is late.

    Its state before the reading, its status, its words, and how late the reader was.
    """
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        process.stdin.write("go\n")
        process.stdin.flush()
        # Its words are in the pipe when this returns, and nobody has read them.
        first = process.stderr.buffer.raw.read(1)
        began = time.monotonic()
        time.sleep(reader_waits)
        before, late = process.poll(), time.monotonic() - began
        return before, process.wait(20), first.decode() + process.stderr.read(), late
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stderr.close()


def test_words_are_read_before_the_process_goes():
    for _ in range(20):
        before, status, text, late = abort(0.1)
        if late < 0.3:  # half a second is all it waits; this process may not have had the core
            break
    assert (before, status, text) == (None, 3, "last words\n")


def test_a_reader_that_does_not_read_holds_nobody():
    before, status, text, _ = abort(3.0)
    assert (before, status, text) == (3, 3, "last words\n")


@pytest.mark.parametrize("captured", [True, False])
def test_words_get_past_a_capture_of_stderr(captured, tmp_path):
    program = f"""
import os
from hpcdist import _engine
from hpcdist.testing import last_words
last_words()
if {captured}:
    os.dup2(os.open({str(tmp_path / "captured")!r}, os.O_CREAT | os.O_WRONLY), 2)
_engine.abort(3, "last words")
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (3, "last words\n")
    if captured:
        assert (tmp_path / "captured").read_text() == "last words\n"
