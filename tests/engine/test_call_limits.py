"""One call's timeout is that call's alone: other threads and the group keep theirs."""

from __future__ import annotations

import threading
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

import hpcdist as dist
import hpcdist.torch
from hpcdist.testing import parallel_assert
from hpcdist.torch.process_group import BridgeGroup

pytestmark = pytest.mark.ranks


def test_two_threads_with_timeouts_of_their_own():
    group = dist.new_group()
    bridge, usual = BridgeGroup(group), group.carrier.timeout
    inside, after, found = threading.Barrier(2), threading.Event(), []

    def begin(number: int, *rest: Any) -> None:
        inside.wait(10.0)  # both are in a call
        found.append(group.carrier.timeout)
        if number:
            after.wait(10.0)  # the one that came first leaves first

    def call(number: int) -> None:
        opts = SimpleNamespace(timeout=timedelta(seconds=5 + number), asyncOp=False)
        bridge._now("barrier", opts, [], begin, number)
        after.set()

    threads = [threading.Thread(target=call, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20.0)
    good = found == [usual] * 2 and group.carrier.timeout == usual
    parallel_assert(good, lambda: f"{found}, afterwards {group.carrier.timeout}, not {usual}")
    dist.destroy_process_group(group)


def test_the_call_gives_up_after_its_own_timeout():
    group = dist.new_group()
    bridge, error = BridgeGroup(group), None
    opts = SimpleNamespace(timeout=timedelta(seconds=0.2), asyncOp=False)
    if dist.get_rank() == 0:
        try:
            bridge._call("barrier", opts, [], [])
        except dist.DistTimeoutError as problem:
            error = problem
    dist.barrier()
    alone = dist.get_world_size() == 1
    good = alone or dist.get_rank() > 0 or "timeout after 0.2" in str(error)
    parallel_assert(good, lambda: repr(error))
