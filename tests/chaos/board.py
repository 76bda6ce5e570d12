"""A page of memory that the ranks and the driver share: where each rank is, and where to meet.

It is a plain file, mapped; so what it says and how ranks meet through it does not depend on
hpcdist.
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

STREAMS = 6
#: Cells of a rank.
PID, DEAD_AT, FIRST = 0, 1, 8
#: Cells of a stream: the step it is in, since when, how long the call may take; how often it has
#: met the others; up to which block rank 0 lets it go; where it ends, once that is known; its vote.
STEP, BEGAN, LIMIT, MET, GO, LAST, VOTE = range(7)
CELLS = FIRST + 8 * STREAMS


class Board:
    """The page. All times are of CLOCK_MONOTONIC, the same in all processes."""

    def __init__(self, path: Path, ranks: int, create: bool = False) -> None:
        mode = "w+" if create else "r+"
        self.cells = np.memmap(path, np.float64, mode, shape=(ranks, CELLS))

    def cell(self, rank: int, stream: int, what: int) -> float:
        return float(self.cells[rank, FIRST + 8 * stream + what])

    def set(self, rank: int, stream: int, what: int, value: float) -> None:
        self.cells[rank, FIRST + 8 * stream + what] = value

    def enter(self, rank: int, stream: int, step: int, limit: float) -> None:
        """A call begins that may take `limit` seconds."""
        at = FIRST + 8 * stream
        row = self.cells[rank]
        row[at + LIMIT] = 0
        row[at + STEP] = step
        row[at + BEGAN] = time.monotonic()
        row[at + LIMIT] = limit

    def leave(self, rank: int, stream: int) -> None:
        self.cells[rank, FIRST + 8 * stream + LIMIT] = 0

    def meet(self, rank: int, stream: int, patience: float = 60.0) -> None:
        """Wait until every rank's stream has come here as often."""
        at = FIRST + 8 * stream + MET
        self.cells[rank, at] += 1
        count, end = self.cells[rank, at], time.monotonic() + patience
        while (self.cells[:, at] < count).any():
            if time.monotonic() > end:
                raise TimeoutError(f"stream {stream}: others did not reach meeting {count:.0f}")
            time.sleep(0.0003)

    def may_go(self, rank: int, stream: int, block: int, end: float) -> bool:
        """Whether to run another block of moves.

        Rank 0 looks at the clock and lets the others go two blocks ahead, so nobody waits here.
        """
        if rank == 0 and not self.cell(0, stream, LAST):
            if time.monotonic() < end:
                self.set(0, stream, GO, block + 2)
            else:
                self.set(0, stream, LAST, max(1, self.cell(0, stream, GO)))
        while True:
            last = self.cell(0, stream, LAST)
            if last:
                return block < last
            if self.cell(0, stream, GO) > block:
                return True
            time.sleep(0.0003)
