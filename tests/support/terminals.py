"""A command in a terminal of its own, as a person has it."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import subprocess
import termios
import time

#: Seconds for anything the tests wait for, on a loaded machine.
PATIENCE = 60.0


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
