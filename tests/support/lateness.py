"""What one rank does only once others have ended or begun something, however long that takes.

Ranks that sleep are late on a quiet machine only. Here they wait for words that come through the
default group.
"""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from cases import here

import hpcdist as dist


def tell(*ranks: int) -> None:
    """Send a word to each of these ranks but this one."""
    for rank in ranks:
        if rank != here()[0]:
            dist.send(torch.zeros(1), rank)


def hear(*ranks: int) -> None:
    """Wait for a word from each of these ranks but this one."""
    for rank in ranks:
        if rank != here()[0]:
            dist.recv(torch.zeros(1), rank)


def tell_all() -> None:
    """Send a word to every other rank."""
    tell(*range(here()[1]))


def names(text: str, rank: int) -> bool:
    """Whether a text names a rank, maybe beside others that the machine has delayed."""
    lists = re.findall(r"\branks? (\d[\d, and]*)", text)
    return any(str(rank) in re.findall(r"\d+", each) for each in lists)


@contextmanager
def once_others_have_ended(late: int) -> Iterator[None]:
    """Let rank `late` begin this block only once all others have ended theirs, by an error too."""
    rank, size = here()
    if rank == late:
        hear(*range(size))
    try:
        yield
    finally:
        if rank != late:
            tell(late)


@contextmanager
def interrupted_call(group: dist.ProcessGroup) -> Iterator[None]:
    """Let a handler raise KeyboardInterrupt in this thread once it has begun a call of `group`."""

    def handler(number, frame):
        raise KeyboardInterrupt

    with handled_call(group, handler):
        yield


@contextmanager
def handled_call(group: dist.ProcessGroup, handler) -> Iterator[None]:
    """Let a signal handler run in this thread once it has begun a call of `group`."""

    def interrupt():
        while group.carrier.seq == calls and not over.wait(1e-3):
            pass
        if not over.is_set():
            signal.pthread_kill(main, signal.SIGALRM)

    calls, over, main = group.carrier.seq, threading.Event(), threading.get_ident()
    before = signal.signal(signal.SIGALRM, handler)
    helper = threading.Thread(target=interrupt)
    helper.start()
    try:
        yield
    finally:
        over.set()
        helper.join()
        signal.signal(signal.SIGALRM, before)
