"""CUDA tensors over MPI, on the stand-in's streams: each operation beside the host's own."""

from __future__ import annotations

import gc
from datetime import timedelta

import cases
import pytest
import standin
import torch
from over_mpi import CHUNK, empty, equal, right, sizes, start
from standin import cpu, gpu

import hpcdist as dist
from hpcdist import ReduceOp
from hpcdist.backends import cuda_over_mpi
from hpcdist.testing import parallel_assert, parallel_raises

pytestmark = [pytest.mark.standin, pytest.mark.usefixtures("over_mpi")]


def some(dtype: torch.dtype, turn: int) -> int:
    """One of the sizes around a buffer's edge: another one for each turn and number of ranks."""
    return sizes(dtype)[(turn + dist.get_world_size()) % 5]


# --- every operation -----------------------------------------------------------------------------


def test_reductions_of_every_type_and_size(rng):
    wrong, rank, size = [], dist.get_rank(), dist.get_world_size()
    for turn, (name, op, dtype) in enumerate(cases.pairs()):
        n = some(dtype, turn)
        drawn = cases.draw(rng, dtype, (size, n))
        own = drawn[rank].clone()
        wanted, bound = cases.reference(name, list(drawn))
        there, root = gpu(own), turn % size
        cuts = [n * i // (size * 2) for i in range(size)] + [n]
        kind = (turn // 2 + size) % 4
        if kind == 0:
            dist.reduce(there, root, op)
            good = right(there, wanted, bound) if rank == root else equal(there, own)
        elif kind == 1:
            n -= n % size
            cuts = [n // size * i for i in range(size + 1)]
            dist.reduce_scatter_tensor(part := empty(n // size, dtype), there[:n], op)
        elif kind == 2:
            parts = [gpu(own[a:b]) for a, b in zip(cuts, cuts[1:], strict=False)]
            dist.reduce_scatter(part := empty(len(parts[rank]), dtype), parts, op)
        else:
            dist.all_reduce(there, op)
            good = right(there, wanted, bound)
        if kind in (1, 2):
            mine = slice(cuts[rank], cuts[rank + 1])
            good = right(part, wanted[mine], bound if isinstance(bound, int) else bound[mine])
        if not good:
            wrong.append((name, dtype, n, kind))
    parallel_assert(not wrong, lambda: str(wrong[:10]))


def test_moves_of_every_type_and_size(rng):
    wrong, rank, size = [], dist.get_rank(), dist.get_world_size()
    for place, dtype in enumerate(cases.MOVED):
        n = some(dtype, place)
        sent = [cases.draw(rng, dtype, n + 2 * size) for _ in range(size)]
        own, root = sent[rank][:n], (n + dtype.itemsize) % size
        checks = []
        if (place // 5 + size) % 2:
            copy = gpu(own) if rank == root else empty(n, dtype)
            dist.broadcast(copy, root)
            checks.append((copy, sent[root][:n]))
            uneven = [empty(n + 2 * i, dtype) for i in range(size)]
            dist.all_gather(uneven, gpu(sent[rank][: n + 2 * rank]))
            checks += [(uneven[i], sent[i][: n + 2 * i]) for i in range(size)]
            mine = empty(n + rank, dtype)
            lists = [gpu(sent[root][: n + i]) for i in range(size)] if rank == root else None
            dist.scatter(mine, lists, root)
            checks.append((mine, sent[root][: n + rank]))
        else:
            whole = empty(n * size, dtype)
            dist.all_gather_into_tensor(whole, gpu(own))
            checks.append((whole, torch.cat([each[:n] for each in sent])))
            outs = [empty(n + 2 * i, dtype) for i in range(size)] if rank == root else None
            dist.gather(gpu(sent[rank][: n + 2 * rank]), outs, root)
            checks += [(each, sent[i][: n + 2 * i]) for i, each in enumerate(outs or [])]
            step = n // size
            crossed, here = empty(step * size, dtype), slice(step * rank, step * rank + step)
            dist.all_to_all_single(crossed, gpu(own[: step * size]))
            checks.append((crossed, torch.cat([each[here] for each in sent])))
        if not all(equal(found, wanted) for found, wanted in checks):
            wrong.append((dtype, n, [equal(*each) for each in checks]))
    parallel_assert(not wrong, lambda: str(wrong[:5]))


def test_lists_and_uneven_exchanges(rng):
    rank, size = dist.get_rank(), dist.get_world_size()
    for n in (0, 3, 150):
        # rank i sends n * (i + j) rows of two to rank j
        rows = [n * (rank + other) for other in range(size)]
        own = torch.from_numpy(rng.random((sum(rows), 2))) + rank
        here, there = torch.empty(sum(rows), 2, dtype=own.dtype), empty(2 * sum(rows), own.dtype)
        dist.all_to_all_single(here, own, rows, rows)
        dist.all_to_all_single(there.reshape(-1, 2), gpu(own), rows, rows)
        parallel_assert(equal(there, here))
        outs = [empty(2 * each, own.dtype).reshape(each, 2) for each in rows]
        work = dist.all_to_all(outs, [gpu(each) for each in own.split(rows)], async_op=True)
        work.wait()
        parallel_assert(equal(torch.cat([cpu(each) for each in outs]), here))
        tensors = [torch.full((n + i, 2), float(rank + i)) for i in range(3)]
        copies = [gpu(each) for each in tensors]
        dist.all_reduce_coalesced(copies)
        total = sum(range(size))
        parallel_assert(all(bool((cpu(c) == total + i * size).all()) for i, c in enumerate(copies)))
        lists = [[empty(2 * (n + i), torch.float32) for i in range(3)] for _ in range(size)]
        flat = [gpu(each.reshape(-1)) for each in tensors]
        dist.all_gather_coalesced(lists, flat)
        parallel_assert(all(bool((cpu(lists[r][i]) == r + i).all())
                            for r in range(size) for i in range(3)))  # fmt: skip


def test_buffers_of_4_mib_and_no_more(runtime, monkeypatch):
    monkeypatch.delenv("HPCDIST_CUDA_CHUNK")
    gc.collect()
    before = runtime.most = runtime.there
    rank, size, n = dist.get_rank(), dist.get_world_size(), (4 << 20) // 4
    for elements in (n, 3 * n + 5):
        data = gpu(torch.arange(elements, dtype=torch.int32) + rank)
        dist.all_reduce(data)
        wanted = torch.arange(elements, dtype=torch.int32) * size + sum(range(size))
        parallel_assert(equal(data, wanted), lambda elements=elements: str(elements))
    parallel_assert(runtime.most - before == 16 << 20, lambda: f"{runtime.most - before} bytes")


# --- streams -------------------------------------------------------------------------------------


def test_streams_wait_for_each_other(runtime):
    runtime.lag = 1e-3
    rank, size = dist.get_rank(), dist.get_world_size()
    n = 5 * CHUNK // 4 + 3
    ones = torch.ones(n)
    for later in (False, True):
        stream = standin.Stream()
        with standin.on(stream):
            data = gpu(torch.zeros(n))
            # the tensor is written by what is on the caller's stream, after a while
            stream.kernel(0.03, data.data_ptr(), ones.data_ptr(), data.nbytes)
            work = dist.all_reduce(data, async_op=later)
            if later:
                parallel_assert(not work.is_completed())
                work.wait()
            # and read by what comes on it afterwards
            copy = torch.zeros(n)
            stream.kernel(0.0, copy.data_ptr(), data.data_ptr(), copy.nbytes)
            out = empty(n * size, torch.float32)
            dist.all_gather_into_tensor(out, data)
            stream.synchronize()
        parallel_assert(bool((copy == size).all()) and bool((cpu(out) == size).all()))
    # an output that the caller's stream still reads is not overwritten
    stream = standin.Stream()
    with standin.on(stream):
        data, old = gpu(torch.full((n,), float(rank))), torch.zeros(n)
        stream.kernel(0.03)
        stream.kernel(0.0, old.data_ptr(), data.data_ptr(), data.nbytes)
        dist.broadcast(data, 0)
        stream.synchronize()
    parallel_assert(bool((old == rank).all()) and bool((cpu(data) == 0).all()))


@pytest.mark.parametrize("elsewhere", [False, True], ids=["same", "other"])
def test_tensors_are_kept_until_the_stream_they_are_from_waits(runtime, elsewhere):
    begun_on, group = standin.Stream(), dist.group.WORLD._backends["cuda"]
    dist.all_reduce(gpu(torch.ones(1)))
    runtime.lag = 0.3
    with standin.on(begun_on):
        work = dist.all_reduce(gpu(torch.ones(4)), async_op=True)
    with standin.on(standin.Stream() if elsewhere else begun_on):
        work.wait()
    kept, done = sum(len(tensors) for _, tensors in group._held), work.is_completed()
    parallel_assert(done or kept == elsewhere, lambda: f"{kept} tensors, {done}")
    begun_on.synchronize()


def test_several_streams_and_dropped_handles(runtime, rng):
    runtime.lag = 2e-4
    size, works = dist.get_world_size(), []
    streams = [standin.Stream() for _ in range(6)]
    for turn in range(18):
        with standin.on(streams[turn % 6]):
            data = gpu(torch.full((700 + turn,), float(turn)))
            work = dist.all_reduce(data, async_op=True)
            if turn % 3:
                works.append((turn, data, work, streams[turn % 6]))
            del data, work  # and nobody holds the tensor any more
    last = gpu(torch.ones(3000))
    dist.all_reduce(last)  # comes after all of them
    parallel_assert(bool((cpu(last) == size).all()))
    for turn, data, work, stream in works:
        with standin.on(stream):
            parallel_assert(work.wait() and work.is_success() and work.exception() is None)
            parallel_assert(bool((cpu(data) == turn * size).all()) and work.result()[0] is data)
    comm = dist.group.WORLD._backends["cuda"]
    parallel_assert(isinstance(comm, cuda_over_mpi.StagedGroup) and len(comm._pool._kept) <= 4)
    future = dist.all_reduce(gpu(torch.ones(9)), async_op=True).get_future()
    parallel_assert(bool((future.wait()[0].as_subclass(torch.Tensor) == size).all()))
    slow = standin.Stream()
    with standin.on(slow):
        slow.kernel(0.3)
        work = dist.all_reduce(gpu(torch.ones(5)), async_op=True)
        with parallel_raises(dist.DistTimeoutError, match=r"all_reduce .cuda. #\d+ .*'world'"):
            work.wait(timedelta(seconds=0.02))
        parallel_assert(work.wait(10.0))


def test_host_tensors_go_on_meanwhile(runtime):
    runtime.lag = 1e-3
    size, big = dist.get_world_size(), gpu(torch.ones(8 * CHUNK))
    work = dist.all_reduce(big, async_op=True)
    for _ in range(20):
        host = torch.ones(100)
        dist.all_reduce(host)
        parallel_assert(bool((host == size).all()))
    dist.barrier()
    parallel_assert(dist.get_backend_config() == "cpu:mpi")
    found = [None] * size
    dist.all_gather_object(found, {"rank": dist.get_rank()})
    parallel_assert(found == [{"rank": rank} for rank in range(size)])
    work.wait()
    parallel_assert(bool((cpu(big) == size).all()))
    group = dist.new_group(list(range(size)), timeout=timedelta(seconds=5))
    more = gpu(torch.ones(1000))
    dist.all_reduce(more, group=group)
    parallel_assert(bool((cpu(more) == size).all()) and group._backends["cuda"].timeout == 5.0)
    dist.destroy_process_group(group)


# --- what goes wrong -----------------------------------------------------------------------------


@pytest.mark.mpi(min_size=2)
def test_ranks_that_differ_are_told():
    rank, size = dist.get_rank(), dist.get_world_size()
    data, kept = gpu(torch.ones(600 + rank // (size - 1))), 600 + rank // (size - 1)
    with parallel_raises(dist.DistMismatchError, match=rf"rank {size - 1}: all_reduce.float32.601"):
        dist.all_reduce(data)
    parallel_assert(bool((cpu(data) == 1).all()) and data.numel() == kept)
    op = ReduceOp.MAX if rank == 0 else ReduceOp.SUM
    work = dist.all_reduce(gpu(torch.ones(5)), op, async_op=True)
    with parallel_raises(dist.DistMismatchError, match="ReduceOp.MAX"):
        work.wait()
    with parallel_raises(dist.DistMismatchError, match="all_reduce"):
        if rank == 0:
            dist.all_reduce(torch.ones(5))
        else:
            dist.all_reduce(gpu(torch.ones(5)))
    with parallel_raises(dist.DistMismatchError, match=r"broadcast|all_reduce"):
        if rank == 0:
            dist.broadcast(gpu(torch.ones(5)), 0)
        else:
            dist.all_reduce(gpu(torch.ones(5)))
    rows = [1 + rank] * size
    out = gpu(torch.empty(sum(rows)))
    with parallel_raises(dist.DistMismatchError, match="does not fit there"):
        dist.all_to_all_single(out, gpu(torch.ones(sum(rows))), rows, rows)
    data = gpu(torch.ones(3000))
    dist.all_reduce(data)
    parallel_assert(bool((cpu(data) == size).all()))


def test_refusals(runtime, monkeypatch):
    monkeypatch.setattr(runtime, "capturing", lambda: True, raising=False)
    with parallel_raises(dist.DistBackendError, match="CUDA graph"):
        dist.all_reduce(gpu(torch.ones(3)))
    monkeypatch.undo()
    monkeypatch.setattr("hpcdist._engine.thread_level", lambda: "serialized")
    with parallel_raises(dist.DistBackendError, match="MPI_THREAD_MULTIPLE"):
        dist.all_reduce(gpu(torch.ones(3)), async_op=True)
    dist.all_reduce(gpu(torch.ones(3)))
    with parallel_raises(ValueError, match="serves cpu .Comm., cuda"):
        dist.all_reduce(torch.ones(3, device="meta"))


def test_destroyed_while_something_is_in_flight(runtime):
    start()
    slow = standin.Stream()
    with standin.on(slow):
        slow.kernel(0.2)
        data = gpu(torch.ones(1000))
        dist.all_reduce(data, async_op=True)
    dist.destroy_process_group()  # waits
    parallel = bool((data.as_subclass(torch.Tensor) == 1).all())
    start()
    parallel_assert(not parallel or dist.get_world_size() == 1)


# --- which backend -------------------------------------------------------------------------------


def test_the_backend_is_chosen_by_itself(monkeypatch, caplog):
    start(backend=None)
    parallel_assert(dist.get_backend_config() == "cpu:mpi,cuda:nccl")
    host, other = torch.ones(3), gpu(torch.ones(3))
    dist.all_reduce(host)
    dist.all_reduce(other)
    parallel_assert(equal(other, host))
    parallel_assert(type(dist.group.WORLD._backends["cuda"]).__name__ == "NcclGroup")

    def missing():
        raise dist.DistBackendError("there is no NCCL to use")

    monkeypatch.setattr("hpcdist._nccl_loader.load", missing)
    monkeypatch.setattr("hpcdist._nccl_loader.is_available", lambda: False)
    with caplog.at_level("WARNING", logger="hpcdist"):
        start(backend=None)
    told = [each for each in caplog.messages if "pinned host memory" in each]
    parallel_assert(len(told) == (dist.get_rank() == 0), lambda: str(caplog.messages))
    parallel_assert(dist.get_backend_config() == "cpu:mpi")
    dist.all_reduce(other)
    parallel_assert(bool((cpu(other) == dist.get_world_size() ** 2).all()))
    start(backend="cuda:mpi")
    dist.all_reduce(other)
    group = dist.new_group(list(range(dist.get_world_size())))
    dist.all_reduce(other, group=group)
    dist.barrier()


# --- several at a time ---------------------------------------------------------------------------


def test_the_next_operation_waits_until_the_buffers_are_empty(runtime, monkeypatch):
    """Those that it fills: what the one before wrote into them may not be on the device yet."""
    size, n, wrong = dist.get_world_size(), CHUNK, []
    plain = standin.Runtime.copy

    def copy(stream, to, source):
        runtime.lag = 0.0 if runtime._is_pinned(to) else 0.003  # each way has its own pace
        plain(runtime, stream, to, source)

    def of(value: float, length: int = n) -> torch.Tensor:
        return gpu(torch.full((length,), value))

    nexts = {
        "all_gather": lambda it: dist.all_gather_into_tensor(of(0.0, size * n), it, async_op=True),
        "reduce_scatter": lambda it: dist.reduce_scatter(of(0.0), [it] * size, async_op=True),
        "all_to_all": lambda it: dist.all_to_all([of(0.0) for _ in range(size)], [it] * size,
                                                 async_op=True),
    }  # fmt: skip
    for name, begin in nexts.items():
        for before in ("all_reduce", "broadcast"):
            for same in (False, True):
                with monkeypatch.context() as patched:
                    patched.setattr(runtime, "copy", copy)
                    there = of(1.0 if before == "all_reduce" else dist.get_rank() + 1.0)
                    works = [
                        dist.all_reduce(there, async_op=True)
                        if before == "all_reduce"
                        else dist.broadcast(there, size - 1, async_op=True)
                    ]
                    works.append(begin(there if same else of(7.0)))
                    for work in works:
                        work.wait()
                wanted = float(size)
                second = works[1].result()[0]
                if name == "reduce_scatter":
                    right_next = size * (wanted if same else 7.0)
                else:
                    right_next = wanted if same else 7.0
                if not ((cpu(there) == wanted).all() and (cpu(second) == right_next).all()):
                    wrong.append((name, before, same, cpu(there).unique(), cpu(second).unique()))
    runtime.lag = 0.0
    parallel_assert(not wrong, lambda: str(wrong))
