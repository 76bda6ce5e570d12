"""Objects between two ranks, sent and received by several threads at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
from cases import here

import hpcdist as dist
from hpcdist.collectives import objects_p2p
from hpcdist.testing import parallel_assert

pytestmark = [pytest.mark.ranks, pytest.mark.mpi(min_size=2)]

#: Bytes: such a payload is on its way for some time after its header.
LONG = 1 << 26


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    """Make each call in a thread of its own; return what they return or raise."""
    found: list[Any] = [None] * len(calls)

    def run(i: int, call: Callable[[], Any]) -> None:
        try:
            found[i] = call()
        except Exception as error:
            found[i] = error

    threads = [threading.Thread(target=run, args=each) for each in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.parametrize("named", [False, True], ids=["from any rank", "from one"])
def test_a_thread_leaves_the_message_of_another_alone(named: bool) -> None:
    """The second thread waited for a payload that the first one had received."""
    rank, size = here()
    group, found = dist.new_group(timeout=timedelta(seconds=20)), []
    sender = size - 1
    begun = objects_p2p._begun.setdefault(group, {})

    def received() -> str:
        items: list[Any] = [None]
        source = dist.recv_object_list(items, sender if named else None, group)
        item = items[0]
        return f"{item} from {source}" if isinstance(item, str) else f"{len(item)} from {source}"

    def late() -> str:
        end = time.monotonic() + 10
        while not begun and time.monotonic() < end:
            time.sleep(0)
        return received()

    dist.barrier(group)
    if rank == sender:
        for items in ([np.zeros(LONG, np.uint8)], ["x"], ["last"]):
            dist.send_object_list(items, 0, group)
    elif rank == 0:
        found = sorted(map(str, at_once(received, late)))
        found.append(received())
        wanted = [f"{LONG} from {sender}", f"x from {sender}", f"last from {sender}"]
        found = [] if found == wanted and not begun else [*found, begun]
    dist.barrier()
    parallel_assert(not found, lambda: f"{found}")
    dist.destroy_process_group(group)


def test_threads_on_both_sides() -> None:
    """Payloads follow their headers, whichever thread is the first to send or to receive one."""
    rank, _ = here()
    group, each, threads, found = dist.new_group(timeout=timedelta(seconds=20)), 60, 3, []

    def send(thread: int) -> None:
        for number in range(each):
            item = np.full((number * 7919 + thread) % 20011, thread * each + number)
            dist.send_object_list([item.size, thread * each + number, item], 0, group)

    def receive(thread: int) -> list[int]:
        got = []
        for number in range(each):
            items: list[Any] = [None] * 3
            dist.recv_object_list(items, 1 if (number + thread) % 2 else None, group)
            length, what, item = items
            good = len(item) == length and (item == what).all()
            got.append(what if good else -1)
        return got

    if rank == 1:
        found = [e for e in at_once(*(lambda t=t: send(t) for t in range(threads))) if e]
    elif rank == 0:
        got = at_once(*(lambda t=t: receive(t) for t in range(threads)))
        found = [e for e in got if not isinstance(e, list)]
        whole = sorted(sum((e for e in got if isinstance(e, list)), []))
        found += [] if whole == list(range(threads * each)) else [whole]
    dist.barrier()
    parallel_assert(not found, lambda: f"{found}")
    dist.destroy_process_group(group)
