"""Threads of all ranks that begin together."""

from __future__ import annotations

import threading
from collections.abc import Iterable

import hpcdist as dist


def at_once(threads: Iterable[threading.Thread]) -> None:
    """Start the threads when all ranks have come here; return when those of all have ended."""
    threads = list(threads)
    dist.barrier()
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    dist.barrier()
