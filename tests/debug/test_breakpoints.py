"""hpcdist.breakpoint under mpirun in a terminal: on the rank mpirun talks to, and on another."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
from jobs import mpirun_command

pytestmark = pytest.mark.jobs

PROGRAM = str(Path(__file__).parent / "breakpoints.py")
#: Seconds for anything the tests wait for, on a loaded machine.
PATIENCE = 20.0


class Terminal:
    """A command in a terminal of its own: type into it, and read until something appears."""

    def __init__(self, *command: str, env: dict[str, str] | None = None) -> None:
        self.text = ""
        self.master, slave = pty.openpty()
        self.process = subprocess.Popen(
            command, env=env, stdin=slave, stdout=slave, stderr=slave, start_new_session=True,
            # Open MPI's mpirun reads from a terminal only where it is in the foreground of it
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )  # fmt: skip
        os.close(slave)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *exc: object) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
            try:
                self.process.wait(5)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        os.close(self.master)

    def type(self, line: str) -> None:
        os.write(self.master, line.encode() + b"\n")

    def until(self, pattern: str, seconds: float = PATIENCE) -> re.Match[str]:
        """Read until the pattern appears after what was found before."""
        end = time.monotonic() + seconds
        while not (found := re.search(pattern, self.text)):
            left = end - time.monotonic()
            assert left > 0, f"{pattern!r} did not come; there is: {self.text}"
            if select.select([self.master], [], [], min(left, 0.2))[0]:
                try:
                    self.text += os.read(self.master, 65536).decode("utf-8", "replace")
                except OSError:  # the other side is closed
                    end = min(end, time.monotonic())
        self.text = self.text[found.end() :]
        return found

    def end(self) -> int:
        self.until(r"\Z", 0.5)
        return self.process.wait(PATIENCE)


def test_on_the_rank_that_mpirun_talks_to():
    command, env = mpirun_command(2)
    with Terminal(*command, sys.executable, PROGRAM, "0", env=env) as terminal:
        terminal.until(r"train\(\)")
        terminal.until(r"\(Pdb, rank 0\) ")
        terminal.type("p secret")
        terminal.until("'only-rank-0-knows-1'")  # the caller's frame, at the second call
        time.sleep(1.5)  # longer than the group's timeout
        terminal.type("next")
        terminal.until(r"-> return secret, after - before|-> after = ")
        terminal.type("p dist.get_rank()")
        terminal.until(r"\b0\b")
        terminal.type("continue")
        waited = sorted(terminal.until(r"rank (\d) waited 0\.\d ([1-9][\d.]*)")[1] for _ in "01")
        assert waited == ["0", "1"]
        assert terminal.end() == 0


def test_on_another_rank_through_a_socket():
    """Rank 1 has no input under either mpirun: it prints how to attach."""
    command, env = mpirun_command(2)
    with Terminal(*command, sys.executable, PROGRAM, "1", env=env) as terminal:
        found = terminal.until(r"python (-m hpcdist attach (\S+))")
        path = Path(found[2])
        assert path.parent.stat().st_mode & 0o777 == 0o700
        with Terminal(sys.executable, *found[1].split()) as attached:
            attached.until(r"\(Pdb, rank 1\) ")
            attached.type("p secret")
            attached.until("'only-rank-1-knows-1'")
            attached.type("continue")
            assert attached.process.wait(PATIENCE) == 0
        for _ in "01":
            terminal.until(r"rank \d waited")
        assert terminal.end() == 0
        assert not path.parent.exists()


def test_attaching_where_nobody_waits():
    done = subprocess.run(
        [sys.executable, "-m", "hpcdist", "attach", "/nowhere/rank1"],
        capture_output=True, text=True, timeout=PATIENCE,
    )  # fmt: skip
    assert done.returncode == 1 and "no rank waits at /nowhere/rank1" in done.stderr
