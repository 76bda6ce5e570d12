"""Names for operations in torch's profiler."""

from __future__ import annotations

import threading

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import hpcdist as dist
from hpcdist.testing import parallel_assert, parallel_raises

pytestmark = pytest.mark.ranks


def test_record_comm_names_the_operations_of_this_thread():
    t = torch.ones(4)
    found = [None] * dist.get_world_size()
    other = threading.Thread(target=lambda: seen.append(dist._engine.name_ranges(None)))
    seen: list[str | None] = []
    with profile(activities=[ProfilerActivity.CPU]) as prof:
        with dist.record_comm("outer"):
            dist.all_reduce(t)
            with dist.record_comm("inner"):
                dist.all_gather_object(found, 1)
            dist.all_reduce(t)
            other.start()
            other.join()
        dist.all_reduce(t)
    names = [event.name for event in prof.events()]
    parallel_assert(names.count("outer") == 2 and names.count("inner") >= 1, f"{names}")
    parallel_assert(sum(name.startswith("hpcdist::all_reduce") for name in names) == 1, f"{names}")
    parallel_assert(seen == [None])
    with parallel_raises(TypeError, match="str"), dist.record_comm(3):
        pass
