"""Timeouts that are very long, and what is no timeout, wherever a timedelta is taken."""

import tempfile
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest

import hpcdist as dist
from hpcdist.groups.reconfigure import agree
from hpcdist.testing import parallel_assert, parallel_raises

pytestmark = pytest.mark.ranks

#: More than a timedelta holds when it is turned to seconds and back; than nanoseconds in 64 bits.
LONG = (timedelta.max, timedelta(days=365 * 300))


@pytest.mark.parametrize("limit", LONG, ids=("longest", "300 years"))
def test_a_very_long_timeout_is_no_limit(limit):
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.new_group(timeout=limit)
    again = dist.new_group()
    dist.set_timeout(limit, again)
    parts = [dist.split_group(group, split_ranks=[list(range(size))]), group, again]
    for each in parts:
        ours, theirs = np.ones(3), np.zeros(3)
        dist.all_reduce(ours, group=each)
        dist.all_reduce(ours, group=each, async_op=True).wait(limit)
        dist.barrier(each, timeout=limit)
        dist.monitored_barrier(each, timeout=limit)
        if size > 1:
            work = dist.irecv(theirs, (rank - 1) % size, group=each)
            dist.send(ours, (rank + 1) % size, group=each)
            work.wait(limit)
        parallel_assert(each.timeout == limit and ours[0] == size**2, (each.timeout, ours))
    if group.supports_window:
        window = group.new_window(dist.zeros(4, group=group))
        window.signal((rank + 1) % size, opts=dist.SignalOptions(timeout=limit))
        window.wait_signal((rank - 1) % size, opts=dist.WaitSignalOptions(timeout=limit))
    for each in parts:
        dist.destroy_process_group(each)


@pytest.mark.once
@pytest.mark.parametrize("limit", (*LONG, 1e300), ids=("longest", "300 years", "1e300 s"))
def test_a_very_long_timeout_of_a_store(limit):
    with tempfile.TemporaryDirectory() as folder:
        stores = [
            dist.HashStore(),
            dist.FileStore(str(Path(folder, "a")), 1, timeout=limit),
            dist.TCPStore("127.0.0.1", 0, 1, True, timeout=limit),
        ]
        found = []
        for store in stores:
            store.set_timeout(limit)
            store.set("key", "value")
            store.wait(["key"], limit)
            store.barrier("all", 1, limit)
            found.append((store.get("key"), store.timeout > timedelta(days=10_000)))
    parallel_assert(found == [(b"value", True)] * 3, found)


def test_what_is_no_timeout_is_refused_by_name():
    work = dist.all_reduce(np.ones(1), async_op=True)
    for call in (
        lambda wrong: dist.barrier(timeout=wrong),
        lambda wrong: dist.new_group(timeout=wrong),
        lambda wrong: dist.set_timeout(wrong),
        lambda wrong: agree(1, None, wrong),
        lambda wrong: dist.group.WORLD.reconfigure(timeout=wrong),
    ):
        for wrong in (3.0, "1", float("nan"), True):
            with parallel_raises(TypeError, match="timeout must be a datetime.timedelta, not"):
                call(wrong)
        for wrong in (timedelta(0), timedelta(seconds=-1)):
            with parallel_raises(ValueError, match="timeout must be positive, not"):
                call(wrong)
    for wrong in ("1", [], True):
        with parallel_raises(TypeError, match="timeout must be a datetime.timedelta or seconds"):
            dist.monitored_barrier(timeout=wrong)
        if wrong is not True:
            with parallel_raises(TypeError, match="timeout must be a datetime.timedelta or sec"):
                work.wait(wrong)
    work.wait()
