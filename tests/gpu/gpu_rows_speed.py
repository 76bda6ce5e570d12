"""Rows of run.py: the pinned ring beside the copy engine, and launches beside torch's NCCL."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from gpu_table import HERE, Row, adder, after, mpirun, rehearsing, size, start

ROWS: list[Row] = []
row = adder(ROWS)


def ranks(count: int, what: str) -> str:
    """What the ranks found."""
    said = mpirun(count, str(HERE / "ranks_speed.py"), what, HPCDIST_CUDA_AWARE="no")
    return after(said, "RESULT\n")


@row("over MPI, 2 ranks: bandwidth of the ring beside the copy engine's own", seconds=20, worth=1)
def ring_two() -> str:
    """The target is 80 % of the slower of the copies and the host's memory."""
    return ranks(2, "bandwidth")


@row("over MPI, 4 ranks: bandwidth of the ring beside the copy engine's own", seconds=25, worth=2)
def ring_four() -> str:
    """Four ranks share the copy engine."""
    return ranks(4, "bandwidth")


@row("over MPI, 2, 3 and 4 ranks: all_reduce of 8 B", seconds=25, worth=2)
def latency() -> str:
    """The whole way through the ring, beside a host tensor."""
    return "\n".join(["below", *(ranks(count, "latency") for count in (2, 3, 4))])


def interleaved(calls: dict[str, Callable[[], object]], rounds: int, times: int) -> str:
    """Median host time of each call in microseconds; the calls take turns."""
    import torch

    taken: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + 1):
        for name, call in calls.items():
            torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(times):
                call()
            if turn:  # the first is warm-up
                taken[name].append((time.perf_counter() - began) / times)
    torch.cuda.synchronize()
    return ", ".join(f"{name} {statistics.median(t) * 1e6:.2f}" for name, t in taken.items())


@row("all_reduce launch beside torch's NCCL, 1 rank, host time in us", seconds=20, worth=1)
def launch() -> str:
    """Synchronous, and async_op with wait(); the binding of ncclAllReduce is the floor."""
    import torch

    import hpcdist as dist
    from hpcdist import _nccl

    start()
    data = torch.ones(2, device="cuda")
    comm = _nccl.Communicator.init(_nccl.unique_id(), 1, 0)
    stream, at = torch.cuda.current_stream().cuda_stream, data.data_ptr()
    calls: dict[str, Callable[[], object]] = {
        "binding": lambda: comm.all_reduce(at, at, 2, _nccl.FLOAT32, _nccl.SUM, stream),
        "hpcdist": lambda: dist.all_reduce(data),
        "hpcdist async": lambda: dist.all_reduce(data, async_op=True).wait(),
    }
    if not rehearsing():
        import torch.distributed as other

        other.init_process_group("nccl", store=other.HashStore(), rank=0, world_size=1)
        calls["torch"] = lambda: other.all_reduce(data)
        calls["torch async"] = lambda: other.all_reduce(data, async_op=True).wait()
    told = interleaved(calls, size(100, 10), 50)
    assert bool((data == 1).all())
    comm.destroy()
    return told + (", torch's not rehearsed: it has no GPU" if rehearsing() else "")


@row("NCCL's windows and memory", seconds=10, worth=3)
def windows() -> str:
    """Whether this NCCL has ncclMemAlloc and ncclCommWindowRegister, and what they do alone."""
    from hpcdist import _nccl, _nccl_loader

    start()
    import torch

    told = []
    names = _nccl_loader.load().optional
    for name in ("mem_alloc", "comm_register", "window_register"):
        told.append(f"{name} {'yes' if name in names else 'no'}")
    if "mem_alloc" not in names:
        return ", ".join(told)
    nbytes = 4 << 20
    comm = _nccl.Communicator.init(_nccl.unique_id(), 1, 0)
    memory = _nccl.mem_alloc(nbytes)
    stream = torch.cuda.current_stream().cuda_stream
    for kind in (False, True) if "window_register" in names else ():
        name = "symmetric window" if kind else "window"
        try:
            handle = comm.window_register(memory, nbytes, kind)
            comm.all_reduce(memory, memory, nbytes // 4, _nccl.FLOAT32, _nccl.SUM, stream)
            torch.cuda.synchronize()
            comm.window_deregister(handle)
            # NCCL gives no handle where it would not use the window
            told.append(f"{name}: {'registered' if handle else 'no handle'}")
        except Exception as error:
            told.append(f"{name}: {type(error).__name__}: {error}")
    _nccl.mem_free(memory)
    comm.destroy()
    return ", ".join(told)
