"""Run the example programs as a user runs them, and read what they print."""

from __future__ import annotations

import re
import subprocess
import sys

from jobs import Ended, run_job
from places import EXAMPLES


def example(np: int, name: str, *arguments: str) -> Ended:
    """Run an example under mpirun; it must end well."""
    ended = run_job(np, str(EXAMPLES / name), *arguments)
    assert ended.code == 0, ended.text
    return ended


def alone(*command: str, limit: float = 90.0) -> subprocess.CompletedProcess[str]:
    """Run Python as one process without mpirun: a world of one."""
    command = (sys.executable, *command)
    return subprocess.run(command, capture_output=True, text=True, timeout=limit)


def lines(text: str, pattern: str) -> list[str]:
    """What ranks said, in the order in which it was printed, as "rank: text"."""
    said = re.findall(r"\[rank (\d+)\] (.*)", text)
    return [f"{rank}: {line}" for rank, line in said if re.search(pattern, line)]


def fingerprint(text: str) -> str:
    """The hash of train_digits.py's parameters, which it prints at the end."""
    return re.search(r"^parameters equal on all ranks: ([0-9a-f]{16})$", text, re.MULTILINE)[1]
