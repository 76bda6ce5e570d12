"""The signals that hpcdist's threads leave to the program; not their own faults."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from hpcdist.testing import parallel_assert

pytestmark = pytest.mark.ranks

FAULTS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)


def blocked_in(name: str) -> list[int]:
    """The masks of this process's threads of a name, as the kernel shows them."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        if (task / "comm").read_text().strip() == name:
            lines = (task / "status").read_text().splitlines()
            found += [int(line.split()[1], 16) for line in lines if line.startswith("SigBlk:")]
    return found


def test_a_fault_in_the_watchdogs_thread_is_not_silent():
    """Blocked, it would end the process without a word, even with faulthandler."""
    masks = blocked_in("hpcdist-watch")
    blocked = [{n for n in range(1, 32) if mask >> n - 1 & 1} for mask in masks]
    parallel_assert(bool(masks) and not any(each & {*FAULTS} for each in blocked), str(masks))
    parallel_assert(all({signal.SIGINT, signal.SIGTERM} <= each for each in blocked), str(masks))
