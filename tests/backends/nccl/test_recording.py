"""Operations over NCCL in the flight recorder's dump, which torchfrtrace reads."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import shutil
import tempfile
import time
from datetime import timedelta

import pytest
import standin
import torch
from patience import hasty_group
from standin import cpu, gpu
from torch.distributed.flight_recorder import fr_trace
from torch.distributed.flight_recorder.components import utils

import hpcdist as dist
import hpcdist.torch
from hpcdist import _engine, flight_recorder
from hpcdist.recordings import read
from hpcdist.recordings.analysis.match import divergences
from hpcdist.testing import parallel_assert

pytestmark = [pytest.mark.standin, pytest.mark.usefixtures("runtime")]


@pytest.fixture
def folder(_process_group, monkeypatch):
    """Where the ranks' dumps go, with the recorder on; a new world, whose groups ask for it."""
    if not dist.is_initialized():
        dist.init_process_group("cpu:mpi,cuda:nccl")
    box = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box, 0)
    dist.destroy_process_group()
    monkeypatch.setattr(flight_recorder, "_made", None)
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "100")
    monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", f"{box[0]}/failed_")
    dist.init_process_group("cpu:mpi,cuda:nccl", timeout=timedelta(seconds=20))
    yield box[0]
    if dist.is_initialized():
        dist.barrier()
        last = dist.get_rank() == 0
        dist.destroy_process_group()
        if last:
            shutil.rmtree(box[0])


def dumped(path: str) -> list[dict]:
    with open(path, "rb") as file:
        return pickle.load(file)["entries"]


def test_the_dump_has_what_went_over_nccl(folder, monkeypatch):
    rank, size = dist.get_rank(), dist.get_world_size()
    data, whole = gpu(torch.ones(2, 3)), gpu(torch.zeros(2 * size, 3))
    dist.all_reduce(data)
    dist.all_gather_into_tensor(whole, data, async_op=True).wait()
    dist.reduce_scatter_tensor(data, whole)
    dist.broadcast(data, 0)
    dist.all_gather([gpu(torch.zeros(2, 3)) for _ in range(size)], data)
    dist.all_to_all_single(whole, whole.clone())
    out = gpu(torch.zeros(5))
    right, left = (rank + 1) % size, (rank - 1) % size
    batch = [
        dist.P2POp(dist.isend, gpu(torch.ones(5)), right),
        dist.P2POp(dist.irecv, out, left),
    ]
    if size > 1:  # torchfrtrace does not end where a rank sends to itself
        for work in dist.batch_isend_irecv(batch):
            work.wait()
    # through a group of torch's it is the same operation, and noted once
    bridge = hpcdist.torch.process_group.BridgeGroup(dist.group.WORLD)
    bridge.allreduce([data]).wait()
    cpu(data)
    stream = standin.Stream()
    with standin.on(stream):
        stream.kernel(0.2)
        late = dist.all_reduce(data, async_op=True)  # is going on while the dump is written
    path = hpcdist.torch.dump_flight_recorder(f"{folder}/rank_")
    late.wait(10.0)
    found = dumped(path)
    names = [each["profiling_name"] for each in found]
    messages = [f"send {rank}->{right}", f"recv {rank}<-{left}", "coalesced"] if size > 1 else []
    kinds = ["all_reduce", "_all_gather_base", "_reduce_scatter_base", "broadcast", "all_gather",
             "all_to_all", *messages, "all_reduce", "all_reduce"]  # fmt: skip
    parallel_assert(names == [f"nccl:{kind}" for kind in kinds], lambda: str(names))
    states = [each["state"] for each in found]
    parallel_assert(states == ["completed"] * (len(kinds) - 1) + ["started"], lambda: str(states))
    first, gathered = found[0], found[1]
    parallel_assert(first["input_sizes"] == [[2, 3]] and first["output_dtypes"] == ["Float"])
    parallel_assert(gathered["output_sizes"] == [[2 * size, 3]])
    here = os.path.basename(__file__)
    parallel_assert(first["frames"][0]["filename"].endswith(here))
    dist.barrier()
    good = True
    if rank == 0:
        # torchfrtrace shows batches with it, and torch does not require it
        monkeypatch.setattr(utils, "tabulate", str, raising=False)
        text, database = io.StringIO(), f"{folder}/database"
        with contextlib.redirect_stdout(text):
            fr_trace.main([folder, "-p", "rank_", "-o", database])
        with open(database, "rb") as file:
            _, said = pickle.load(file)
        wrong = [each for each in said.collectives if not each.pass_check]
        good = bool(said.collectives) and not wrong
    parallel_assert(good, lambda: f"{wrong} {text.getvalue()}")


@pytest.mark.mpi(min_size=2)
def test_a_failure_writes_a_dump(folder):
    rank = dist.get_rank()
    group = hasty_group(0.4)
    data = gpu(torch.ones(4))
    dist.all_reduce(data, group=group)
    cpu(data)
    error = None
    if rank:
        try:
            dist.all_reduce(data, group=group, async_op=True).wait(10.0)
        except dist.DistError as problem:
            error = problem
    dist.barrier()
    parallel_assert(rank == 0 or isinstance(error, (dist.DistTimeoutError, dist.RankFailedError)))
    path = f"{folder}/failed_{rank}"
    parallel_assert(os.path.exists(path) == (rank > 0))
    if rank:
        last = dumped(path)[-1]
        assert last["profiling_name"] == "nccl:all_reduce" and last["state"] == "started"
    with contextlib.suppress(dist.DistError):
        dist.destroy_process_group(group)


def test_the_native_recorder_has_them_without_a_setting():
    if not dist.is_initialized():
        dist.init_process_group("cpu:mpi,cuda:nccl")
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.new_group()
    dist.all_reduce(gpu(torch.ones(6)), dist.ReduceOp.MAX, group)
    dist.broadcast(gpu(torch.ones(3)), 0, group, async_op=True).wait()
    peers = [(rank + 1) % size, (rank - 1) % size]
    batch = [
        dist.P2POp(dist.isend, gpu(torch.ones(5)), group=group, group_peer=peers[0]),
        dist.P2POp(dist.irecv, gpu(torch.ones(5)), group=group, group_peer=peers[1]),
    ]
    for work in dist.batch_isend_irecv(batch):
        work.wait(10.0)
    name = f"{group.group_name} (NCCL)"
    until = time.monotonic() + 30
    while True:  # the watchdog notes the ends
        kept = read(_engine.recorder_path()).operations
        named = [one for one in kept if one.group is not None and one.group.name == name]
        mine = [one for one in named if one.group.uid == named[-1].group.uid]  # others are gone
        if all(one.finished for one in mine) or time.monotonic() > until:
            break
        time.sleep(0.01)
    found = [(one.name, one.kind, one.seq, one.peer, one.elements, one.state) for one in mine]
    wanted = [
        ("all_reduce", "all_reduce", 1, -1, 6, "done"),
        ("broadcast", "broadcast", 2, 0, 3, "done"),
        ("batch_isend_irecv", "send", 0, peers[0], 5, "done"),
        ("batch_isend_irecv", "recv", 0, peers[1], 5, "done"),
    ]
    parallel_assert(found == wanted, lambda: str(found))
    sites = {one.site.function for one in mine if one.site}
    parallel_assert(sites == {"test_the_native_recorder_has_them_without_a_setting"})
    parallel_assert([mine[0].op, mine[0].dtype] == ["MAX", "float32"], lambda: str(mine[0]))
    dist.destroy_process_group(group)


def divergences_of(group) -> list:
    """Gather the ranks' recordings and compare their calls of a group over NCCL."""
    paths = [None] * dist.get_world_size()
    dist.all_gather_object(paths, _engine.recorder_path())
    found = divergences([read(path) for path in paths])
    name = f"{group.group_name} (NCCL)"
    mine = [str(each) for each in found if each.collective.group.name == name]
    dist.barrier()  # all have read
    return mine


@pytest.mark.mpi(min_size=2)
def test_uneven_calls_are_no_divergence():
    if not dist.is_initialized():
        dist.init_process_group("cpu:mpi,cuda:nccl")
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.new_group()
    rows = [gpu(torch.ones(2 + peer)) for peer in range(size)]
    more = [gpu(torch.ones(2 + 2 * peer)) for peer in range(size)]
    dist.all_gather(rows, gpu(torch.ones(2 + rank)), group=group)
    dist.reduce_scatter(gpu(torch.ones(2 + rank)), rows, group=group)
    own = [gpu(torch.ones(2 + rank)), gpu(torch.ones(2 + 2 * rank))]
    lists = [[a, b] for a, b in zip(rows, more, strict=True)]
    dist.all_gather_coalesced(lists, own, group=group)
    cpu(rows[0])
    found = divergences_of(group)
    parallel_assert(not found, lambda: str(found))
    kept = read(_engine.recorder_path()).operations
    name = f"{group.group_name} (NCCL)"
    mine = [one for one in kept if one.group is not None and one.group.name == name][-3:]
    whole = sum(2 + peer for peer in range(size))
    sizes = [(one.elements, one.inputs, one.outputs) for one in mine]
    both = 4 + 3 * rank, whole + sum(2 + 2 * peer for peer in range(size))
    wanted = [(2, 2 + rank, whole), (2, whole, 2 + rank), (2, *both)]
    parallel_assert(sizes == wanted, lambda: str(sizes))
    dist.destroy_process_group(group)
