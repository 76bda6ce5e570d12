"""Operations as ranges in torch's profiler, with bytes and group, also over several ranks."""

from __future__ import annotations

import gc
import json

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import hpcdist as dist
from hpcdist import MPIOptions
from hpcdist.cli.merge_traces import merge
from hpcdist.testing import parallel_assert, parallel_raises

pytestmark = pytest.mark.ranks


def names(prof):
    return [event.name for event in prof.events() if event.name.startswith("hpcdist::")]


def recorded(function):
    """What a function leaves in the profiler, without the prefix."""
    with profile(activities=[ProfilerActivity.CPU]) as prof:
        function()
    return [name.removeprefix("hpcdist::") for name in names(prof)], prof


@pytest.mark.deadline(120)
def test_every_operation_is_a_range():
    rank, size = dist.get_rank(), dist.get_world_size()
    t, big = torch.ones(100), torch.ones(100 * size)
    parts = [torch.ones(100) for _ in range(size)]
    objects = [None] * size
    mine = parts if rank == 0 else None
    whole = 400 * size
    rooted = whole if rank == 0 else 400
    cases = {
        "all_reduce (400 B, world)": lambda: dist.all_reduce(t),
        "all_reduce_coalesced (800 B, world)": lambda: dist.all_reduce_coalesced([t, t.clone()]),
        "reduce (400 B, world)": lambda: dist.reduce(t, 0),
        "broadcast (400 B, world)": lambda: dist.broadcast(t, 0),
        f"all_gather ({whole} B, world)": lambda: dist.all_gather(parts, t),
        f"all_gather_into_tensor ({whole} B, world)": lambda: dist.all_gather_single(big, t),
        f"gather ({rooted} B, world)": lambda: dist.gather(t, mine, 0),
        f"scatter ({rooted} B, world)": lambda: dist.scatter(t, mine, 0),
        f"reduce_scatter ({whole} B, world)": lambda: dist.reduce_scatter(t, parts),
        f"reduce_scatter_tensor ({whole} B, world)": lambda: dist.reduce_scatter_single(t, big),
        f"all_to_all ({whole} B, world)": lambda: dist.all_to_all(
            [torch.empty(100) for _ in range(size)], parts
        ),
        f"all_to_all_single ({whole} B, world)": lambda: dist.all_to_all_single(big.clone(), big),
        "barrier (0 B, world)": lambda: dist.barrier(),
        "all_reduce (24 B, world)": lambda: dist.all_reduce(np.ones(3)),
    }
    for name, call in cases.items():
        found, _ = recorded(call)
        parallel_assert(found == [name], f"{name}: {found}")
    for name, call in {
        "monitored_barrier": lambda: dist.monitored_barrier(),
        "all_gather_object": lambda: dist.all_gather_object(objects, rank),
        "broadcast_object_list": lambda: dist.broadcast_object_list([rank], 0),
        "gather_object": lambda: dist.gather_object(rank, objects if rank == 0 else None, 0),
        "scatter_object_list": lambda: dist.scatter_object_list([None], objects, 0),
    }.items():
        found, _ = recorded(call)
        outer = [each for each in found if each == f"{name} (world)"]
        inner = [each for each in found if " B, world" in each]
        parallel_assert(len(outer) == 1, f"{name}: {found}")
        parallel_assert(bool(inner), f"{name}: {found}")


def test_an_asynchronous_operation_has_two_ranges():
    """Where it is begun and where it is waited for; also if that is after the profiler's end."""
    works = []

    def run():
        works[:] = [dist.all_reduce(torch.ones(1 << 20), async_op=True) for _ in "ab"]
        works[0].wait()

    for _ in range(3):
        found, _ = recorded(run)
        begun = f"all_reduce ({4 << 20} B, world, async)"
        parallel_assert(found.count(begun) == 2, found)
        # it may have been complete already
        parallel_assert(found.count("wait (all_reduce, world)") <= 1, found)
        works[1].wait()
        gc.collect()


@pytest.mark.mpi(min_size=2)
def test_point_to_point_and_groups():
    rank = dist.get_rank()
    group = dist.new_group([0, 1])

    def run():
        t = torch.ones(10, dtype=torch.int16)
        if rank == 0:
            dist.send(t, 1)
            dist.isend(t, 1).wait()
            dist.send_object_list([1], 1)
        elif rank == 1:
            dist.recv(t)
            dist.irecv(t, 0).wait()
            dist.recv_object_list([None], 0)
        if rank < 2:
            dist.all_reduce(t, group=group)

    found, _ = recorded(run)
    expected = {
        0: ["send (20 B, world, to 1)", "isend (20 B, world, to 1)", "send_object_list (world)"],
        1: ["recv (20 B, world, from any)", "irecv (20 B, world, from 0)",
            "recv_object_list (world)"],
    }.get(rank, [])  # fmt: skip
    if rank < 2:
        expected.append(f"all_reduce (20 B, {group.name})")
    parallel_assert(set(expected) <= set(found), found)
    if rank < 2:
        dist.destroy_process_group(group)


@pytest.mark.mpi(min_size=2)
def test_ranges_end_with_an_error_and_without_a_profiler_there_are_none(tmp_path):
    rank = dist.get_rank()
    group = dist.new_group(pg_options=MPIOptions(check="on"))
    with profile(activities=[ProfilerActivity.CPU]) as prof:
        with parallel_raises(dist.DistMismatchError):
            dist.all_reduce(torch.ones(1 + rank), group=group)
        with torch.profiler.record_function("after"):
            dist.barrier(group)
    (failed,) = [each for each in prof.events() if "::all_reduce" in each.name]
    (after,) = [each for each in prof.events() if each.name == "after"]
    parallel_assert(failed.time_range.end <= after.time_range.start)
    parallel_assert(after.cpu_parent is None)
    dist.all_reduce(torch.ones(3), group=group)
    with profile(activities=[ProfilerActivity.CPU]) as prof:
        torch.ones(3) + 1
    parallel_assert(not names(prof))
    dist.destroy_process_group(group)


def test_traces_of_all_ranks_merge(tmp_path):
    def run():
        work = dist.all_reduce(torch.ones(1 << 16), async_op=True)
        dist.barrier()
        work.wait()
        work.get_future().wait()

    _, prof = recorded(run)
    path = tmp_path / "trace.json"
    prof.export_chrome_trace(str(path))
    texts = [None] * dist.get_world_size()
    dist.all_gather_object(texts, path.read_text())
    merged = merge([json.loads(text) for text in texts])["traceEvents"]
    for event in ("barrier (0 B, world)", f"all_reduce ({4 << 16} B, world, async)"):
        pids = {each["pid"] for each in merged if each["name"] == "hpcdist::" + event}
        parallel_assert(len(pids) == dist.get_world_size(), event)
