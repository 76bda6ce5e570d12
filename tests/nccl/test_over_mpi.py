"""CUDA tensors over MPI, on the stand-in's streams: each operation beside the host's own."""

from __future__ import annotations

import gc
import re
import time
from datetime import timedelta

import cases
import pytest
import standin
import torch
from standin import cpu, gpu

import hpcdist as dist
from hpcdist import ReduceOp
from hpcdist.backends import staging
from hpcdist.testing import parallel_assert, parallel_raises

#: Bytes of a buffer in these tests: its edge is near.
CHUNK = 1024


def start(seconds: float = 20.0, backend: str | None = "mpi") -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group(backend, timeout=timedelta(seconds=seconds))


@pytest.fixture(autouse=True)
def _settings(monkeypatch, _process_group, runtime):
    monkeypatch.setenv("HPCDIST_CUDA_CHUNK", str(CHUNK))
    runtime.lag = 0.0
    there = dist.is_initialized() and dist.group.WORLD._backends.get("cuda")
    if not isinstance(there, staging.StagedGroup):
        start()


def sizes(dtype: torch.dtype) -> tuple[int, ...]:
    """Elements around the edge of a buffer."""
    n = CHUNK // dtype.itemsize
    return 0, 1, n - 1, n, 3 * n + 5


def some(dtype: torch.dtype, turn: int) -> list[int]:
    """Two of these sizes; 1 to 4 ranks together take all, for every turn."""
    return [sizes(dtype)[(turn + 2 * dist.get_world_size() + i) % 5] for i in range(2)]


def empty(n: int, dtype: torch.dtype) -> torch.Tensor:
    """Poison on the device."""
    return gpu(torch.full((n * dtype.itemsize,), 0x5A, dtype=torch.uint8).view(dtype))


def same(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return cases.raw(cpu(found)) == cases.raw(wanted)


def near(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """The same, but for the order in which floats were added: pieces may take another."""
    if not (wanted.is_floating_point() or wanted.is_complex()):
        return same(found, wanted)
    eps = torch.finfo(wanted.dtype).eps * 8 * dist.get_world_size()
    wide = torch.complex128 if wanted.is_complex() else torch.float64
    return torch.allclose(cpu(found).to(wide), wanted.to(wide), rtol=eps, atol=eps, equal_nan=True)


# --- every operation -----------------------------------------------------------------------------


def test_reductions_of_every_type_and_size(rng):
    wrong, rank, size, turn = [], dist.get_rank(), dist.get_world_size(), 0
    for place, (name, op, dtype) in enumerate(cases.pairs()):
        for n in some(dtype, place):
            turn += 1
            own = cases.draw(rng, dtype, (size, n))[rank].clone()
            here, there = own.clone(), gpu(own)
            dist.all_reduce(here, op)
            dist.all_reduce(there, op)
            good = near(there, here)
            root = turn % size
            if turn % 3 == 0:
                there = gpu(own)
                dist.reduce(there, root, op)
                good &= near(there, here) if rank == root else same(there, own)
            if turn % 3 == 1:
                n -= n % size
                part, other = torch.empty(n // size, dtype=dtype), empty(n // size, dtype)
                dist.reduce_scatter_tensor(part, own[:n], op)
                dist.reduce_scatter_tensor(other, gpu(own[:n]), op)
                good &= near(other, part)
            if turn % 3 == 2:
                cuts = [n * i // (size * 2) for i in range(size)] + [n]
                parts = [own[a:b] for a, b in zip(cuts, cuts[1:], strict=False)]
                part, other = torch.empty_like(parts[rank]), empty(len(parts[rank]), dtype)
                dist.reduce_scatter(part, parts, op)
                dist.reduce_scatter(other, [gpu(each) for each in parts], op)
                good &= near(other, part)
            if not good:
                wrong.append((name, dtype, n))
    parallel_assert(not wrong, lambda: str(wrong[:10]))


def test_moves_of_every_type_and_size(rng):
    wrong, rank, size = [], dist.get_rank(), dist.get_world_size()
    for place, dtype in enumerate(cases.MOVED):
        for n in some(dtype, place):
            sent = [cases.draw(rng, dtype, n + 2 * size) for _ in range(size)]
            own, root = sent[rank][:n], (n + dtype.itemsize) % size
            checks = []
            copy = gpu(own) if rank == root else empty(n, dtype)
            dist.broadcast(copy, root)
            checks.append((copy, sent[root][:n]))
            whole = empty(n * size, dtype)
            dist.all_gather_into_tensor(whole, gpu(own))
            checks += [(whole[i * n : i * n + n], sent[i][:n]) for i in range(size)]
            uneven = [empty(n + 2 * i, dtype) for i in range(size)]
            dist.all_gather(uneven, gpu(sent[rank][: n + 2 * rank]))
            checks += [(uneven[i], sent[i][: n + 2 * i]) for i in range(size)]
            outs = [empty(n + 2 * i, dtype) for i in range(size)] if rank == root else None
            dist.gather(gpu(sent[rank][: n + 2 * rank]), outs, root)
            checks += [(each, sent[i][: n + 2 * i]) for i, each in enumerate(outs or [])]
            mine = empty(n + rank, dtype)
            lists = [gpu(sent[root][: n + i]) for i in range(size)] if rank == root else None
            dist.scatter(mine, lists, root)
            checks.append((mine, sent[root][: n + rank]))
            crossed = empty(n // size * size, dtype)
            step = n // size
            dist.all_to_all_single(crossed, gpu(own[: step * size]))
            for i in range(size):
                found = crossed[i * step : i * step + step]
                checks.append((found, sent[i][rank * step : rank * step + step]))
            if not all(same(found, wanted) for found, wanted in checks):
                wrong.append((dtype, n, [same(*each) for each in checks]))
    parallel_assert(not wrong, lambda: str(wrong[:5]))


def test_lists_and_uneven_exchanges(rng):
    rank, size = dist.get_rank(), dist.get_world_size()
    for n in (0, 3, 700):
        # rank i sends n * (i + j) rows of two to rank j
        rows = [n * (rank + other) for other in range(size)]
        own = torch.from_numpy(rng.random((sum(rows), 2))) + rank
        here, there = torch.empty(sum(rows), 2, dtype=own.dtype), empty(2 * sum(rows), own.dtype)
        dist.all_to_all_single(here, own, rows, rows)
        dist.all_to_all_single(there.reshape(-1, 2), gpu(own), rows, rows)
        parallel_assert(same(there, here))
        outs = [empty(2 * each, own.dtype).reshape(each, 2) for each in rows]
        work = dist.all_to_all(outs, [gpu(each) for each in own.split(rows)], async_op=True)
        work.wait()
        parallel_assert(same(torch.cat([cpu(each) for each in outs]), here))
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


def test_order_in_memory(rng):
    data = torch.from_numpy(rng.random((30, 40)).astype("float32"))
    turned = gpu(data).t()
    dist.all_reduce(turned)
    parallel_assert(near(turned.t().contiguous(), data * dist.get_world_size()))
    with parallel_raises(ValueError, match="not dense"):
        dist.all_reduce(gpu(data)[:, ::2])
    with parallel_raises(ValueError, match="must be C-contiguous"):
        dist.all_gather_into_tensor(empty(1200 * dist.get_world_size(), torch.float32), turned)
    with parallel_raises(TypeError, match="MIN"):
        dist.all_reduce(gpu(torch.zeros(3, dtype=torch.complex64)), ReduceOp.MIN)
    with parallel_raises(ValueError, match=r"tensor is on cpu|on cuda only"):
        dist.all_gather([torch.ones(3)] * dist.get_world_size(), gpu(torch.ones(3)))
    leaf = gpu(torch.ones(3)).requires_grad_()
    with parallel_raises(ValueError, match="leaf that requires grad"):
        dist.all_reduce(leaf)


def test_buffers_of_4_mib_and_no_more(runtime, monkeypatch):
    monkeypatch.delenv("HPCDIST_CUDA_CHUNK")
    gc.collect()
    before = runtime.most = runtime.there
    rank, size, n = dist.get_rank(), dist.get_world_size(), (4 << 20) // 4
    for elements in (n - 1, n, 3 * n + 5):
        data = gpu(torch.arange(elements, dtype=torch.int32) + rank)
        dist.all_reduce(data)
        wanted = torch.arange(elements, dtype=torch.int32) * size + sum(range(size))
        parallel_assert(same(data, wanted), lambda elements=elements: str(elements))
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
    parallel_assert(isinstance(comm, staging.StagedGroup) and len(comm._rings._kept) <= 4)
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


# --- messages ------------------------------------------------------------------------------------


@pytest.mark.mpi(min_size=2)
def test_messages_of_every_size(runtime, rng):
    runtime.lag = 2e-4
    rank, size = dist.get_rank(), dist.get_world_size()
    after, before = (rank + 1) % size, (rank - 1) % size
    for dtype in (torch.float32, torch.bfloat16, torch.complex128, torch.bool):
        for n in (*sizes(dtype), 2 * CHUNK // dtype.itemsize):
            sent = [cases.draw(rng, dtype, n) for _ in range(size)]
            out = empty(n, dtype)
            batch = [dist.P2POp(dist.isend, gpu(sent[rank]), after),
                     dist.P2POp(dist.irecv, out, before)]  # fmt: skip
            for work in dist.batch_isend_irecv(batch):
                work.wait()
            parallel_assert(same(out, sent[before]), lambda n=n, d=dtype: f"{d} {n}")
            out = empty(n, dtype)
            if rank == 0:
                dist.send(gpu(sent[0]), 1)
            elif rank == 1:
                parallel = dist.recv(out)  # from any rank
                assert parallel == 0 and same(out, sent[0])
    dist.barrier()


@pytest.mark.mpi(min_size=2)
def test_messages_keep_their_order_and_tags(runtime):
    runtime.lag = 2e-4
    rank, good, n = dist.get_rank(), True, 3 * CHUNK // 4
    if rank == 0:
        works = [dist.isend(gpu(torch.full((n + i,), float(i))), 1, tag=i % 2) for i in range(6)]
        works.append(dist.isend(torch.full((4,), 9.0), 1, tag=7))  # of the host
        works.append(dist.isend(gpu(torch.full((5,), 8.0)), 1, tag=8))  # to the host
        for work in works:
            work.wait()
    elif rank == 1:
        outs = [gpu(torch.empty(n + i)) for i in range(6)]
        odd = [dist.irecv(outs[i], 0, tag=1) for i in (1, 3, 5)]
        for work in odd:
            work.wait()
        even = [dist.irecv(outs[i], tag=0) for i in (0, 2, 4)]
        for work in even:
            work.wait()
            good &= work.source_rank() == 0
        good &= all(bool((cpu(out) == i).all()) for i, out in enumerate(outs))
        short, host = gpu(torch.empty(4)), torch.empty(5)
        dist.recv(short, 0, tag=7)
        dist.recv(host, 0, tag=8)
        good &= bool((cpu(short) == 9).all()) and bool((host == 8).all())
    own, back = gpu(torch.full((n,), float(rank))), gpu(torch.empty(n))
    works = [dist.irecv(back, rank), dist.isend(own, rank)]  # to itself
    for work in works:
        work.wait()
    parallel_assert(good)
    parallel_assert(bool((cpu(back) == rank).all()))


@pytest.mark.mpi(min_size=2)
def test_a_message_that_does_not_fit(runtime):
    rank, n, said = dist.get_rank(), CHUNK // 4, []
    for sent, wanted in ((3 * n, 2 * n), (2 * n, 5 * n), (n, n - 1)):
        if rank == 0:
            dist.send(gpu(torch.ones(sent)), 1)
        elif rank == 1:
            try:
                dist.recv(gpu(torch.empty(wanted)), 0)
            except dist.DistMismatchError as error:
                said.append(str(error))
        # the next one is not taken for what was left
        if rank == 0:
            dist.send(gpu(torch.full((2 * n,), 2.0)), 1)
        elif rank == 1:
            out = gpu(torch.empty(2 * n))
            dist.recv(out, 0)
            assert bool((cpu(out) == 2).all())
    parallel_assert(rank != 1 or len(said) == 3, lambda: str(said))


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


@pytest.mark.mpi(min_size=2)
def test_a_rank_that_fails_in_the_middle_or_does_not_come(runtime, monkeypatch):
    start(2.0)
    rank, size = dist.get_rank(), dist.get_world_size()
    later = size % 2 == 1
    patient = dist.new_group(list(range(size)), timeout=timedelta(seconds=50))
    data = gpu(torch.ones(8 * CHUNK // 4))
    dist.all_reduce(data)
    copies = 0

    def copy(self, *about):
        nonlocal copies
        copies += 1
        if rank == 1 and copies == 7:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        standin.Runtime.copy(self, *about)

    monkeypatch.setattr(runtime, "copy", copy.__get__(runtime), raising=False)
    began, error = time.monotonic(), None
    try:
        work = dist.all_reduce(data, async_op=later)
        if later:
            work.wait()
    except (RuntimeError, dist.DistTimeoutError) as caught:
        error = caught
    taken = time.monotonic() - began
    monkeypatch.undo()
    monkeypatch.setenv("HPCDIST_CUDA_CHUNK", str(CHUNK))
    dist.barrier(group=patient)  # the others have given up
    # then all go on together, as often as they like
    good = True
    for n in (5, 3000):
        data = gpu(torch.ones(n))
        dist.all_reduce(data)
        good &= bool((cpu(data) == size).all())
    late = None
    if rank:
        try:
            dist.all_reduce(gpu(torch.ones(2000)))
        except dist.DistTimeoutError as caught:
            late = caught
    dist.barrier(group=patient)
    start()
    parallel_assert(good)
    wanted = r"after 2 s in all_reduce .cuda.*rank 1.*piece \d of 8.*in part"
    wanted = "illegal memory" if rank == 1 else wanted
    parallel_assert(taken < 6 and re.search(wanted, str(error), re.DOTALL), lambda: str(error))
    parallel_assert(not rank or "rank 0 has not joined" in str(late), lambda: str(late))


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


# --- MPI that takes device memory ----------------------------------------------------------------


def test_addresses_are_given_to_an_mpi_that_takes_them(runtime, monkeypatch, rng):
    monkeypatch.setenv("HPCDIST_CUDA_AWARE", "yes")
    start()
    copies, wrong = 0, []

    def copy(self, *about):
        nonlocal copies
        copies += 1
        standin.Runtime.copy(self, *about)

    monkeypatch.setattr(runtime, "copy", copy.__get__(runtime), raising=False)
    rank, size = dist.get_rank(), dist.get_world_size()
    for name, op, dtype in cases.pairs():
        own = cases.draw(rng, dtype, (size, 700))[rank].clone()
        here, there, some = own.clone(), gpu(own), gpu(own)
        stream, copies = standin.Stream(), 0
        dist.all_reduce(here, op)
        with standin.on(stream):
            stream.kernel(0.002, there.data_ptr(), own.data_ptr(), own.nbytes)
            dist.all_reduce(there, op)
            dist.reduce(some, size - 1, op, async_op=True).wait()
            good = near(there, here) and (rank < size - 1 or near(some, here))
        straight = name in ("SUM", "AVG") and dtype in (torch.float32, torch.float64)
        if not good or (straight and copies):
            wrong.append((name, dtype, copies))
    parallel_assert(not wrong, lambda: str(wrong))
    copies = 0
    whole, data = empty(999 * size, torch.bfloat16), gpu(torch.full((999,), 3.0)).bfloat16()
    dist.all_gather_into_tensor(whole, data)
    dist.broadcast(data, 0)
    parallel_assert(copies == 0 and bool((cpu(whole) == 3).all()) and bool((cpu(data) == 3).all()))
    crossed = empty(999 * size, torch.bfloat16)
    dist.all_to_all_single(crossed, whole)  # by the ring
    parallel_assert(copies > 0 and bool((cpu(crossed) == 3).all()))
    dist.destroy_process_group()


def test_what_the_library_says(monkeypatch):
    from hpcdist.backends.staging import aware

    parallel_assert(aware.said() == (False, "nothing says so"))
    monkeypatch.setattr("hpcdist._engine.memory_kinds", lambda: "mpi,system,cuda:device")
    parallel_assert(aware.said() == (True, "mpi_memory_alloc_kinds"))
    monkeypatch.setattr("hpcdist._engine.memory_kinds", lambda: "")
    monkeypatch.setenv("MPICH_GPU_SUPPORT_ENABLED", "1")
    parallel_assert(not aware.said()[0])  # this is no Cray
    monkeypatch.setattr("hpcdist._engine.library_version", lambda: "CRAY MPICH version 8.1")
    parallel_assert(aware.said() == (True, "MPICH_GPU_SUPPORT_ENABLED=1"))


# --- which backend -------------------------------------------------------------------------------


def test_the_backend_is_chosen_by_itself(monkeypatch, caplog):
    start(backend=None)
    parallel_assert(dist.get_backend_config() == "cpu:mpi,cuda:nccl")
    host, other = torch.ones(3), gpu(torch.ones(3))
    dist.all_reduce(host)
    dist.all_reduce(other)
    parallel_assert(same(other, host))
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
