"""What each rank writes down, one line an outcome, and how the driver reads it.

A line is complete or not there: it goes out in one write, so a rank that is killed loses nothing
that it had seen.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Outcome:
    """What came of one call on one rank.

    Attributes
    ----------
    stream, number, part : int
        The stream, its step, and which of the step's calls.
    kind : str
        ``ok``; ``wrong``, a result that is not right; ``error``; ``own``, an exception of the
        program's own signal handler; ``lost``, such an exception that did not come out; ``away``,
        no call by this rank; ``dropped``, a result that nobody saw; ``note``.
    began, spent : float
        When the longest wait began, by CLOCK_MONOTONIC, and its seconds.
    text : str
        The exception's type and message, or what is wrong.
    """

    stream: int
    number: int
    part: int
    kind: str
    began: float
    spent: float
    text: str


class Journal:
    """A rank's file; threads may write to it."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.fd = os.open(folder / f"journal.{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(
        self, stream: int, number: int, part: int, kind: str, began: float, text: str = "",
        ended: float | None = None,
    ) -> None:  # fmt: skip
        spent = (time.monotonic() if ended is None else ended) - began
        flat = text.replace("\t", " ").replace("\n", " / ")[:400]
        line = f"{stream}\t{number}\t{part}\t{kind}\t{began:.6f}\t{spent:.6f}\t{flat}\n"
        os.write(self.fd, line.encode("utf-8", "replace"))

    def note(self, text: str) -> None:
        self.write(0, -1, 0, "note", time.monotonic(), text)


def read(path: Path) -> list[Outcome]:
    """All lines of a rank's journal."""
    if not path.exists():
        return []
    found = []
    for line in path.read_text("utf-8", "replace").splitlines():
        stream, number, part, kind, began, spent, text = line.split("\t", 6)
        outcome = (int(stream), int(number), int(part), kind, float(began), float(spent), text)
        found.append(Outcome(*outcome))
    return found
