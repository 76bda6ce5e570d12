"""The signals that hpcdist's threads leave to the program; not their own faults."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

import hpcdist as dist
from hpcdist.testing import parallel_assert

pytestmark = pytest.mark.ranks

FAULTS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)


def threads() -> set[Path]:
    return set(Path("/proc/self/task").iterdir())


def blocked_in(tasks: set[Path]) -> list[set[int]]:
    """The masks of this process's threads, as the kernel shows them."""
    found = []
    for task in tasks:
        lines = (task / "status").read_text().splitlines()
        masks = [int(line.split()[1], 16) for line in lines if line.startswith("SigBlk:")]
        found += [{n for n in range(1, 32) if mask >> n - 1 & 1} for mask in masks]
    return found


def only_faults_pass(blocked: list[set[int]]) -> bool:
    """Blocked, a fault would end the process without a word, even with faulthandler."""
    return bool(blocked) and all(
        {signal.SIGINT, signal.SIGTERM} <= each and not each & {*FAULTS} for each in blocked
    )


def test_a_fault_in_the_watchdogs_thread_is_not_silent():
    watching = {t for t in threads() if (t / "comm").read_text().strip() == "hpcdist-watch"}
    blocked = blocked_in(watching)
    parallel_assert(only_faults_pass(blocked), str(blocked))


def test_nor_is_one_in_that_of_a_store():
    before = threads()
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
    blocked = blocked_in(threads() - before)
    parallel_assert(only_faults_pass(blocked), str(blocked))
    del store
