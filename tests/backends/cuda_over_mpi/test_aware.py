"""CUDA tensors over an MPI that takes device memory: it gets the tensors' addresses."""

from __future__ import annotations

import ctypes

import cases
import pytest
import standin
import torch
from over_mpi import copies, empty, equal, right, start
from standin import cpu, gpu

import hpcdist as dist
from hpcdist.backends.cuda_over_mpi import aware
from hpcdist.testing import parallel_assert, parallel_raises

pytestmark = [pytest.mark.standin, pytest.mark.usefixtures("over_mpi")]


def test_reductions_by_an_mpi_that_takes_addresses(runtime, monkeypatch, rng):
    monkeypatch.setenv("HPCDIST_CUDA_AWARE", "yes")
    start()
    rank, size, wrong = dist.get_rank(), dist.get_world_size(), []
    for turn, (name, op, dtype) in enumerate(cases.pairs()):
        n = 700 // size * size
        drawn = cases.draw(rng, dtype, (size, n))
        own, mine = drawn[rank].clone(), slice(n // size * rank, n // size * (rank + 1))
        wanted, bound = cases.reference(name, list(drawn))
        kind = (turn // 3 + size) % 4
        part, there = empty(n // size, dtype), empty(n, dtype)
        stream = standin.Stream()
        with copies(runtime) as made, standin.on(stream):
            # written on the caller's stream, after a while: MPI has to be kept from it until then
            stream.kernel(0.002, there.data_ptr(), own.data_ptr(), own.nbytes)
            if kind == 0:
                dist.all_reduce(there, op)
            elif kind == 1:
                dist.reduce(there, size - 1, op, async_op=True).wait()
            elif kind == 2:
                dist.reduce_scatter_tensor(part, there, op)
            else:
                blocks = list(there.split(n // size))
                dist.reduce_scatter(part, blocks, op, async_op=True).wait()
            if kind < 2:
                good = (kind == 1 and rank < size - 1) or right(there, wanted, bound)
            else:
                limit = bound if isinstance(bound, int) else bound[mine]
                good = right(part, wanted[mine], limit)
        floats = (torch.float32, torch.float64)
        straight = (name in ("SUM", "AVG", "PRODUCT") and dtype in floats) or (
            name not in ("AVG", "SUM") and dtype in cases.INTS
        )
        if not good or (straight and made.count):
            wrong.append((name, dtype, kind, made.count))
    parallel_assert(not wrong, lambda: str(wrong))
    dist.destroy_process_group()


def test_moves_by_an_mpi_that_takes_addresses(runtime, monkeypatch, rng):
    monkeypatch.setenv("HPCDIST_CUDA_AWARE", "yes")
    start()
    rank, size = dist.get_rank(), dist.get_world_size()
    with copies(runtime) as made:
        for dtype, n in ((torch.bfloat16, 999), (torch.float8_e5m2, 0), (torch.complex128, 90_001)):
            sent = [cases.draw(rng, dtype, n + 2 * size) for _ in range(size)]
            own, checks = sent[rank][:n], []
            stream = standin.Stream()
            with standin.on(stream):
                data = empty(n, dtype)  # written on the stream, after a while
                stream.kernel(0.02, data.data_ptr(), own.data_ptr(), own.nbytes)
                whole = empty(n * size, dtype)
                dist.all_gather_into_tensor(whole, data, async_op=True).wait()
                checks.append((whole, torch.cat([each[:n] for each in sent])))
            dist.broadcast(data, size - 1)
            checks.append((data, sent[-1][:n]))
            uneven = [empty(n + 2 * i, dtype) for i in range(size)]
            dist.all_gather(uneven, gpu(sent[rank][: n + 2 * rank]))
            checks += [(uneven[i], sent[i][: n + 2 * i]) for i in range(size)]
            for root in {0, size - 1}:
                outs = [empty(n + i, dtype) for i in range(size)] if rank == root else None
                dist.gather(gpu(sent[rank][: n + rank]), outs, root)
                checks += [(each, sent[i][: n + i]) for i, each in enumerate(outs or [])]
                mine = empty(n + rank, dtype)
                lists = [gpu(sent[root][: n + i]) for i in range(size)] if rank == root else None
                dist.scatter(mine, lists, root)
                checks.append((mine, sent[root][: n + rank]))
            step = n // size
            crossed = empty(step * size, dtype)
            dist.all_to_all_single(crossed, gpu(own[: step * size]))
            checks.append(
                (crossed, torch.cat([each[rank * step : rank * step + step] for each in sent]))
            )
            rows = [(rank + other) % 3 for other in range(size)]
            out, data = empty(sum(rows), dtype), gpu(sent[rank][: sum(rows)])
            here = torch.empty(sum(rows), dtype=dtype)
            dist.all_to_all_single(out, data, rows, rows, async_op=True).wait()
            dist.all_to_all_single(here, cpu(data), rows, rows)
            outs = [empty(each, dtype) for each in rows]
            dist.all_to_all(outs, list(data.split(rows)))
            checks += [(out, here), (torch.cat([cpu(each) for each in outs]), here)]
            good = [equal(*each) for each in checks]
            parallel_assert(all(good), lambda d=dtype, g=good: f"{d} {g}")
    parallel_assert(made.count == 0, lambda: f"{made.count} copies")
    if size > 1:
        rows = [1 + rank] * size
        data, out = gpu(torch.ones(sum(rows))), gpu(torch.empty(sum(rows)))
        with parallel_raises(dist.DistMismatchError, match=r"rank 0 sends 1 elements where rank 1"):
            dist.all_to_all_single(out, data, rows, rows)
        _messages_by_address(runtime, rank)
    dist.destroy_process_group()


def _messages_by_address(runtime, rank: int) -> None:
    """Long ones go as they are, short ones through a pinned buffer, and both sides may differ."""
    good, expected = True, []
    with copies(runtime) as made:
        if rank == 0:
            works = [dist.isend(gpu(torch.full((n,), float(n))), 1, tag=3) for n in (9000, 9, 5000)]
            works.append(dist.isend(torch.full((7000,), 4.0), 1))  # the host's, to a device
            works.append(dist.isend(gpu(torch.full((6000,), 5.0)), 1))  # and the other way
            for work in works:
                work.wait()
            dist.send(gpu(torch.ones(9)), 1)  # to a receive that is longer
            dist.send(gpu(torch.ones(9000)), 1)  # and to one that is shorter
        elif rank == 1:
            outs = [empty(n, torch.float32) for n in (9000, 9, 5000, 7000)]
            for out in outs[:3]:
                good &= dist.recv(out, None if len(out) == 5000 else 0, tag=3) == 0
            dist.recv(outs[3], 0)
            wanted = (9000.0, 9.0, 5000.0, 4.0)
            good &= all(bool((cpu(o) == w).all()) for o, w in zip(outs, wanted, strict=True))
            dist.recv(host := torch.empty(6000), 0)
            good &= bool((host == 5).all())
            for n in (8000, 7000):
                try:
                    dist.recv(empty(n, torch.float32), 0)
                except dist.DistMismatchError as error:
                    expected.append(str(error))
    parallel_assert(good and made.count == max(2 - rank, 0), lambda: f"{good}, {made.count} copies")
    parallel_assert(rank != 1 or len(expected) == 2, lambda: str(expected))


def test_what_the_library_says(monkeypatch):
    parallel_assert(aware.library_report() == (False, "nothing indicates it"))
    monkeypatch.setattr("hpcdist._engine.memory_kinds", lambda: "mpi,system,cuda:device")
    parallel_assert(aware.library_report() == (True, "mpi_memory_alloc_kinds"))
    monkeypatch.setattr("hpcdist._engine.memory_kinds", lambda: "")
    monkeypatch.setenv("MPICH_GPU_SUPPORT_ENABLED", "1")
    parallel_assert(not aware.library_report()[0])  # this is no Cray
    monkeypatch.setattr("hpcdist._engine.library_version", lambda: "CRAY MPICH version 8.1")
    parallel_assert(aware.library_report() == (True, "MPICH_GPU_SUPPORT_ENABLED=1"))
    monkeypatch.undo()
    for chosen, wanted in (("auto", False), ("yes", True), ("no", False)):
        monkeypatch.setenv("HPCDIST_CUDA_AWARE", chosen)
        parallel_assert(aware.takes_device_memory() is wanted)
    # the extensions' functions, of a library that has one of them or the other
    simple = ctypes.CFUNCTYPE(ctypes.c_int)
    general = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.POINTER(ctypes.c_int))

    def answers(kind, there):
        there[0] = kind == 0  # CUDA
        return 0

    for name, function, wanted in (
        ("MPIX_Query_cuda_support", simple(lambda: 1), True),
        ("MPIX_Query_cuda_support", simple(lambda: 0), False),
        ("MPIX_GPU_query_support", general(answers), True),
        ("MPIX_GPU_query_support", general(lambda kind, there: 1), False),
    ):
        library = type("Library", (), {name: staticmethod(function)})
        parallel_assert(aware._by_function(library) == (name if wanted else ""))


@pytest.mark.mpi(min_size=2)
def test_blocks_that_one_rank_reduces_in_place(monkeypatch):
    """Into its own part of the input, while the others have a tensor for it."""
    monkeypatch.setenv("HPCDIST_CUDA_AWARE", "yes")
    start()
    rank, size, n, wrong = dist.get_rank(), dist.get_world_size(), 700, []
    total = size * (size + 1) / 2
    for listed in (False, True):
        for later in (False, True):
            whole = gpu(torch.full((size * n,), rank + 1.0))
            parts = list(whole.split(n))
            out = parts[rank] if rank == 0 else empty(n, torch.float32)
            if listed:
                work = dist.reduce_scatter(out, parts, async_op=later)
            else:
                work = dist.reduce_scatter_tensor(out, whole, async_op=later)
            if work is not None:
                work.wait()
            if not (cpu(out) == total).all():
                wrong.append((listed, later, cpu(out).unique()))
    parallel_assert(not wrong, lambda: str(wrong))
    dist.destroy_process_group()
