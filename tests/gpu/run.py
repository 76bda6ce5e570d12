#!/usr/bin/env python
"""Run on one GPU all that needs one, and print a table for docs/gpu.md.

    python tests/gpu/run.py            everything that this machine allows
    python tests/gpu/run.py -k overlap rows whose name has "overlap"

Needs a torch built with CUDA and its NCCL, and hpcdist installed; no MPI launcher. Exits with 1 if
a row failed. Without a GPU nothing is run, and it says so and exits with 2.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

ROWS: list[tuple[str, Callable[[], str]]] = []


def row(name: str) -> Callable[[Callable[[], str]], Callable[[], str]]:
    """Add a row to the table; its function returns what to print, or raises."""

    def add(function: Callable[[], str]) -> Callable[[], str]:
        ROWS.append((name, function))
        return function

    return add


def start() -> None:
    """A world of one over NCCL alone, met over a store in this process."""
    import hpcdist as dist

    if not dist.is_initialized():
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)


def microseconds(call: Callable[[], object], times: int = 200) -> float:
    """Median seconds of a call on the host, in microseconds."""
    import torch

    taken = []
    for _ in range(times):
        torch.cuda.synchronize()
        began = time.perf_counter()
        call()
        taken.append(time.perf_counter() - began)
    torch.cuda.synchronize()
    return sorted(taken)[times // 2] * 1e6


@row("NCCL")
def library() -> str:
    """Which library serves."""
    from hpcdist import _nccl_loader

    return repr(_nccl_loader.load())


@row("every operation and element type, one rank")
def operations() -> str:
    """Results of one rank are its inputs, for every operation that NCCL takes."""
    import torch

    import hpcdist as dist
    from hpcdist import _nccl, dtypes

    start()
    count = 0
    for dtype in dtypes.DTYPES:
        kind = dtype.torch_dtype
        data = torch.randint(0, 2, (1001,), device="cuda").to(torch.float32).to(kind)
        want = data.clone()
        for op in dtype.ops:
            try:
                _nccl.reduction(dtype.code, dist.ReduceOp(op).code)
            except TypeError:
                continue
            dist.all_reduce(data, dist.ReduceOp(op))
            dist.reduce(data, 0, dist.ReduceOp(op))
            part = torch.empty_like(data)
            dist.reduce_scatter_tensor(part, data, dist.ReduceOp(op))
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


@row("send to itself in a batch")
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


@row("all_reduce launch, 1 rank, 8 B: binding, hpcdist, torch")
def launch() -> str:
    """Host time of a launch."""
    import torch

    import hpcdist as dist
    from hpcdist import _nccl

    start()
    data = torch.ones(2, device="cuda")
    comm = _nccl.Communicator.init(_nccl.unique_id(), 1, 0)
    stream = torch.cuda.current_stream().cuda_stream
    at = data.data_ptr()
    bare = microseconds(lambda: comm.all_reduce(at, at, 2, _nccl.FLOAT32, _nccl.SUM, stream))
    ours = microseconds(lambda: dist.all_reduce(data))
    comm.destroy()
    import torch.distributed as other

    other.init_process_group("nccl", store=other.HashStore(), rank=0, world_size=1)
    theirs = microseconds(lambda: other.all_reduce(data))
    other.destroy_process_group()
    return f"{bare:.1f} / {ours:.1f} / {theirs:.1f} us"


@row("all_reduce beside a matmul: overlap")
def overlap() -> str:
    """An asynchronous operation and a computation together, beside their sum."""
    import torch

    import hpcdist as dist

    start()
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    data = torch.ones(1 << 28, device="cuda")

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


@row("tensors live until their operation is over")
def lifetime() -> str:
    """Memory of a dropped tensor is not given to another while NCCL writes to it."""
    import torch

    import hpcdist as dist

    start()
    for _ in range(50):
        data = torch.ones(1 << 22, device="cuda")
        work = dist.all_reduce(data, async_op=True)
        del data
        junk = [torch.full((1 << 22,), 7.0, device="cuda") for _ in range(4)]
        work.wait()
        result = work.result()[0]
        assert bool((result == 1).all())
        del junk, work, result
    return "right 50 times"


@row("a collective in a CUDA graph")
def graph() -> str:
    """Capture of an operation of the binding, replayed."""
    import torch

    from hpcdist import _nccl

    comm = _nccl.Communicator.init(_nccl.unique_id(), 1, 0)
    data = torch.ones(1024, device="cuda")
    op = comm.premul_sum(2.0, _nccl.FLOAT32)
    at = data.data_ptr()
    comm.all_reduce(at, at, 1024, _nccl.FLOAT32, _nccl.SUM, torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        stream = torch.cuda.current_stream().cuda_stream
        comm.all_reduce(at, at, 1024, _nccl.FLOAT32, op, stream)
    for _ in range(3):
        captured.replay()
    torch.cuda.synchronize()
    assert bool((data == 8).all()), data[:4]
    comm.destroy()
    return "replayed 3 times"


@row("two ranks on one GPU")
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
            [sys.executable, "-c", program, str(rank), f"file://{path}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    said = [job.communicate(timeout=120)[0] for job in jobs]
    path.unlink(missing_ok=True)
    assert all("give each its own" in text for text in said), said
    return "refused with a clear error on both"


def main() -> int:
    """Run the rows and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-k", default="", help="only rows whose name has this text")
    chosen = parser.parse_args().k
    try:
        import torch

        there = torch.cuda.is_available()
    except ImportError:
        there = False
    if not there:
        print("no GPU that torch can use: nothing was run")
        return 2
    failed = 0
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}\n\n| what | result |\n|---|---|"
    )
    for name, function in ROWS:
        if chosen not in name:
            continue
        try:
            said = function()
        except Exception as error:
            traceback.print_exc()
            said, failed = f"FAILED: {type(error).__name__}: {error}", failed + 1
        print(f"| {name} | {said} |", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
