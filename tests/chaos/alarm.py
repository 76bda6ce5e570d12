"""Signals in the middle of a call, and the end of a process."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import hpcdist as dist
from chaos.board import DEAD_AT, Board

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import breaking  # noqa: E402


class Interrupted(Exception):
    """What our handlers raise."""


class Died(BaseException):
    """What ends a rank: nothing in its program may catch it."""


class Alarm(breaking.Alarm):
    """A signal whose handler passes, raises or calls."""

    def __init__(self) -> None:
        super().__init__()
        self.raised = False
        self.what, self.group, self.problem = "passes", None, ""

    def attempt(self, make: Callable[[], None], after: float, what: str, group: Any) -> None:
        """Make a call and have the signal come `after` seconds."""
        self.what, self.group, self.problem, self.raised = what, group, "", False
        self.around(make, after)
        if self.raised:
            self.problem = "an exception of a signal handler was lost"

    def act(self) -> None:
        """Do what was drawn for this call."""
        if self.what == "raises":
            self.raised = True
            raise Interrupted
        if self.what == "calls" and self._waits():
            before = self.group.carrier.seq
            try:
                dist.all_reduce(np.ones(1), group=self.group)
                if before != self.group.carrier.seq:
                    self.problem = "a call in a handler of the same group's call returned"
            except Exception:  # that is right: nobody else makes this call
                pass

    def _waits(self) -> bool:
        """Whether this thread waits in the group; else a call would be one more, for all ranks."""
        try:
            self.group.carrier.leave_handler()
        except dist.DistError:
            return True
        return False


def arm_death(board: Board, rank: int, after: float, how: str) -> None:
    """End this process later, in whatever it is then."""

    def handle(*_: Any) -> None:
        board.cells[rank, DEAD_AT] = time.monotonic()
        if how == "exception":
            raise Died("on purpose")
        if how == "sys.exit":
            sys.exit(3)
        os._exit(0)

    def kill() -> None:
        board.cells[rank, DEAD_AT] = time.monotonic()
        os.kill(os.getpid(), getattr(signal, how))

    if how.startswith("SIG"):
        timer = threading.Timer(after, kill)
        timer.daemon = True
        timer.start()
    else:
        signal.signal(signal.SIGALRM, handle)
        signal.setitimer(signal.ITIMER_REAL, after)
