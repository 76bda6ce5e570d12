"""What the programs of test_endings.py share."""

from __future__ import annotations

import os
import time

import numpy as np

import hpcdist as dist


def say(text: str) -> None:
    """Print a line in one piece: print() would write text and newline apart, and ranks mix."""
    os.write(1, f"{text}\n".encode())


def others_wait(idle: bool = False) -> None:
    """What the ranks do that are not at fault: a collective, or computing for long."""
    if idle:
        time.sleep(120)
    dist.all_reduce(np.ones(3, np.float32))
