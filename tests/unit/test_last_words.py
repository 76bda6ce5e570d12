"""What a process writes before it aborts the job must be read before the launcher goes down."""

from __future__ import annotations

import subprocess
import sys
import time

PROGRAM = """
import sys
from hpcdist import _engine
sys.stdin.readline()
_engine.abort(3, "last words")
"""


def abort(reader_waits: float) -> tuple[int | None, int, str]:
    """Abort a process whose reader is late: its state before the reading, its status, its words."""
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
        time.sleep(reader_waits)
        before = process.poll()
        return before, process.wait(20), first.decode() + process.stderr.read()
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stderr.close()


def test_words_are_read_before_the_process_goes():
    before, status, text = abort(0.1)
    assert (before, status, text) == (None, 3, "last words\n")


def test_a_reader_that_does_not_read_holds_nobody():
    before, status, text = abort(3.0)
    assert (before, status, text) == (3, 3, "last words\n")
