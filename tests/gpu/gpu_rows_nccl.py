"""Rows of run.py: NCCL with one rank, and what it refuses."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

from gpu_table import (
    HERE,
    Row,
    adder,
    finish,
    last,
    mpirun,
    needs_a_gpu,
    python,
    size,
    start,
)

ROWS: list[Row] = []
row = adder(ROWS)


@row("NCCL", seconds=8, worth=1)
def library() -> str:
    """Which library serves."""
    from hpcdist import _nccl_loader

    return repr(_nccl_loader.load())


@row("every operation and element type, one rank", seconds=15, worth=1)
def operations() -> str:
    """Results of one rank are its inputs, for every operation that NCCL takes."""
    import torch

    import hpcdist as dist
    from hpcdist import _nccl, dtypes

    start()
    count = 0
    for dtype in dtypes.DTYPES:
        kind = dtype.torch_dtype
        # converted on the host: a GPU has no kernels for some of the types
        data = torch.randint(0, 2, (1001,)).to(torch.float32).to(kind).to("cuda")
        want = data.clone()
        for name in dtype.ops:
            op = dist.ReduceOp.PREMUL_SUM(1.0) if name == "PREMUL_SUM" else dist.ReduceOp(name)
            try:
                _nccl.reduction(dtype.code, op.code)
            except TypeError:
                continue
            dist.all_reduce(data, op)
            dist.reduce(data, 0, op)
            part = torch.empty_like(data)
            dist.reduce_scatter_tensor(part, data, op)
            assert torch.equal(part.view(torch.uint8), want.view(torch.uint8)), (dtype, op)
            count += 3
        out = torch.empty_like(data)
        for call in (
            lambda data=data, out=out: dist.all_gather_into_tensor(out, data),
            lambda data=data, out=out: dist.all_to_all_single(out, data),
            lambda data=data, out=out: dist.all_gather([out], data),
            lambda data=data, out=out: dist.gather(data, [out], 0),
            lambda data=data, out=out: dist.scatter(out, [data], 0),
            lambda data=data, out=out: dist.broadcast(out.copy_(data), 0),
        ):
            out.view(torch.uint8).zero_()
            call()
            assert torch.equal(out.view(torch.uint8), want.view(torch.uint8)), dtype
            count += 1
    dist.barrier()
    return f"{count} calls right"


@row("send to itself in a batch", seconds=8, worth=2)
def messages() -> str:
    """A send and its receive start together."""
    import torch

    import hpcdist as dist

    start()
    data, out = torch.randn(1 << 20, device="cuda"), torch.empty(1 << 20, device="cuda")
    batch = [dist.P2POp(dist.isend, data, 0), dist.P2POp(dist.irecv, out, 0)]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    assert torch.equal(data, out)
    return "right"


@row("all_reduce beside a matmul: overlap", seconds=12, worth=2)
def overlap() -> str:
    """An asynchronous operation and a computation together, beside their sum."""
    import torch

    import hpcdist as dist

    start()
    n = size(8192, 64)
    a = torch.randn(n, n, device="cuda", dtype=torch.bfloat16)
    data = torch.ones(size(1 << 28, 1 << 12), device="cuda")

    def both(move: bool, compute: bool) -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        work = dist.all_reduce(data, async_op=True) if move else None
        if compute:
            for _ in range(4):
                a @ a
        if work is not None:
            work.wait()
        torch.cuda.synchronize()
        return time.perf_counter() - began

    both(True, True)
    move, compute, together = both(True, False), both(False, True), both(True, True)
    return f"{move * 1e3:.1f} + {compute * 1e3:.1f} ms apart, {together * 1e3:.1f} ms together"


@row("the group's stream and the caller's wait for each other", seconds=12, worth=1)
def streams() -> str:
    """What is computed before an operation is in it; what comes after wait() sees its result."""
    import torch

    import hpcdist as dist

    start()
    n, mine = size(4096, 64), [torch.cuda.Stream() for _ in range(3)]
    kept = []
    for turn in range(30):
        with torch.cuda.stream(mine[turn % 3]):
            a = torch.ones(n, n, device="cuda")
            for _ in range(4):
                a = a @ a / n  # keeps the stream busy; all ones again
            data = a * turn
            work = dist.all_reduce(data, async_op=True)
            kept.append((turn, data, work))
            part = torch.empty_like(data)
            dist.reduce_scatter_tensor(part, data * 2)  # on the caller's stream
            kept.append((turn * 2, part, None))
    for turn, data, work in kept:
        with torch.cuda.stream(mine[turn % 3 if work is not None else turn // 2 % 3]):
            if work is not None:
                work.wait()
            good = bool((data == turn).all())
        assert good, turn
    return "right 60 times, on 3 streams"


@row("tensors live until their operation is over, memory being short", seconds=15, worth=2)
def lifetime() -> str:
    """Memory of a dropped tensor is not given to another while NCCL writes to it."""
    import torch

    import hpcdist as dist

    start()
    torch.cuda.empty_cache()
    # so little that the allocator has to use again what has been dropped
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (1 << 30)) / total)
    n = size(1 << 25, 1 << 10)  # 128 MiB
    try:
        for turn in range(60):
            data = torch.full((n,), float(turn), device="cuda")
            work = dist.all_reduce(data, async_op=True)
            del data
            junk = [torch.full((n,), -1.0, device="cuda") for _ in range(4)]
            work.wait()
            result = work.result()[0]
            assert bool((result == turn).all()), turn
            del junk, work, result
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    return f"right 60 times, {n >> 18} MiB each in 1 GiB"


@row("collectives in a CUDA graph, captured and replayed", seconds=12, worth=1)
def graph() -> str:
    """Synchronous and asynchronous calls, between kernels; the watchdog goes on meanwhile."""
    import torch

    import hpcdist as dist

    start()
    needs_a_gpu("torch's graphs need one")
    data, more = torch.ones(1024, device="cuda"), torch.zeros(2048, device="cuda")
    half = dist.ReduceOp.PREMUL_SUM(0.5)
    watched = torch.ones(1 << 28, device="cuda")
    dist.all_reduce(data)
    torch.cuda.synchronize()
    for _ in range(20):
        busy = dist.all_reduce(watched, async_op=True)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        data.mul_(4)
        dist.all_reduce(data, half)
        work = dist.all_reduce(data, half, async_op=True)
        time.sleep(0.1)  # the watchdog looks at what is in flight every 20 ms
        work.wait()
        data.mul_(2)
        dist.all_gather_into_tensor(more[:1024], data)
        dist.broadcast(more, 0)
    busy.wait()
    for _ in range(3):
        captured.replay()
    torch.cuda.synchronize()
    assert bool((data == 8).all()) and bool((more[:1024] == 8).all()), (data[:4], more[:4])
    data.fill_(1)
    dist.all_reduce(data, async_op=True).wait()  # and outside of it as before
    torch.cuda.synchronize()
    assert bool((data == 1).all())
    return "replayed 3 times, right"


@row("what cannot be captured into a CUDA graph", seconds=12, worth=1)
def graph_refused() -> str:
    """A clear error, and the capture is not broken off."""
    import torch

    import hpcdist as dist
    from hpcdist.errors import DistBackendError

    start()
    needs_a_gpu("torch's graphs need one")
    data = torch.ones(8, device="cuda")
    before = dist.all_reduce(torch.ones(1 << 28, device="cuda"), async_op=True)
    os.environ["HPCDIST_NCCL_SPLIT"] = "0"
    fresh = dist.new_group([0])  # without a communicator
    del os.environ["HPCDIST_NCCL_SPLIT"]
    captured, said = torch.cuda.CUDAGraph(), 0
    with torch.cuda.graph(captured):
        work = dist.all_reduce(data, async_op=True)
        for call in (
            lambda: dist.barrier(),
            lambda: dist.all_reduce(data, group=fresh),
            lambda: work.wait(1.0),
            lambda: work.is_completed(),
        ):
            try:
                call()
            except DistBackendError as error:
                said += "CUDA graph" in str(error)
        work.wait()
    before.wait()
    captured.replay()
    torch.cuda.synchronize()
    assert said == 4, said
    return "4 clear errors, and the rest of the graph was replayed"


@row("two ranks on one GPU", seconds=20, worth=2)
def refused() -> str:
    """NCCL refuses, and the error says what to do."""
    program = """
import sys, torch, hpcdist as dist
torch.cuda.set_device(0)
dist.init_process_group("nccl", sys.argv[2], rank=int(sys.argv[1]), world_size=2)
try:
    dist.all_reduce(torch.ones(1, device="cuda"))
    torch.cuda.synchronize()
except dist.DistError as error:
    print("SAID", error)
"""
    path = Path(f"/tmp/hpcdist-gpu-{time.time_ns()}")
    jobs = [
        subprocess.Popen(
            [*python(), "-c", program, str(rank), f"file://{path}"],
            cwd=HERE,
            env={**os.environ, "NCCL_STANDIN_BUS": "1b000"},  # of a rehearsal: both are there
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        for rank in range(2)
    ]
    said = [finish(job, 120) for job in jobs]
    path.unlink(missing_ok=True)
    assert all("give each its own" in text for text in said), said
    return "refused with a clear error on both"


@row("the backend is chosen by itself", seconds=12, worth=2)
def chosen() -> str:
    """Without a name: MPI for the host's tensors, NCCL for the GPU's."""
    program = """
import torch, hpcdist as dist
dist.init_process_group()
host, gpu = torch.ones(3), torch.ones(3, device="cuda")
dist.all_reduce(host)
dist.all_reduce(gpu)
assert torch.equal(host, gpu.cpu())
print(dist.get_backend_config())
"""
    said = last(mpirun(1, "-c", program))
    assert said == "cpu:mpi,cuda:nccl", said
    return said


@row("synchronous calls wait on the host with HPCDIST_NCCL_BLOCKING_WAIT=1", seconds=10)
def blocking() -> str:
    """When the call is back nothing is left in the stream."""
    import torch

    import hpcdist as dist

    start()
    os.environ["HPCDIST_NCCL_BLOCKING_WAIT"] = "1"
    try:
        group = dist.new_group([0])  # a group reads its settings when it is made
    finally:
        del os.environ["HPCDIST_NCCL_BLOCKING_WAIT"]
    n = size(4096, 64)
    data, a = torch.ones(size(1 << 28, 1 << 12), device="cuda"), torch.ones(n, n, device="cuda")
    for _ in range(5):
        for _ in range(10):
            a = a @ a * 0  # something to wait for
        dist.all_reduce(data, group=group)
        assert torch.cuda.current_stream().query()
    dist.destroy_process_group(group)
    return "nothing left in the stream, 5 times"
