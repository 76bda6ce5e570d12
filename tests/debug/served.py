"""A job with a debug server: what test_server.py and the browser's tests start.

    mpirun -n 2 python served.py KIND [SECONDS]

Each rank prints ``pid RANK PID ADDRESS``. The work that all kinds do first has a known result.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

import numpy as np

import hpcdist as dist
from hpcdist.debug import start_debug_server, stop_debug_server

TOKEN = "a-token-of-the-test"


def say(text: str) -> None:
    os.write(1, f"{text}\n".encode())  # at once: the ranks share a pipe


def hang(rank: int, seconds: float) -> None:
    """Rank 1 is late for a barrier."""
    if rank == 1:
        time.sleep(seconds)  # hung: hang
    dist.barrier()  # here: hang


def work(rank: int, seconds: float) -> None:
    """All ranks work, and check what they get, until the file SERVED_END is there."""
    size, until = dist.get_world_size(), time.time() + seconds
    end = os.environ.get("SERVED_END", "")
    goes_on = np.ones(1)
    while goes_on[0]:
        for _ in range(200):
            data = np.full(3, rank + 1.0)
            dist.all_reduce(data)
            assert (data == size * (size + 1) / 2).all()
        goes_on[0] = time.time() < until and not os.path.exists(end)
        dist.broadcast(goes_on, 0)


def both(rank: int, seconds: float) -> None:
    """Work for a while, then hang."""
    large = np.ones(400_000, np.float32)
    for _ in range(12):
        work(rank, 0.4)
        dist.all_reduce(large)
        dist.all_gather_into_tensor(np.ones(4096 * dist.get_world_size()), np.ones(4096))
    hang(rank, seconds)


def bridge(rank: int, seconds: float) -> None:
    """Stock torch, with rank 1 late."""
    import torch
    import torch.distributed as stock

    stock.all_reduce(torch.ones(3))
    if rank == 1:
        time.sleep(seconds)  # hung: bridge
    stock.barrier()  # here: bridge


def error_of(call: Callable[[], object]) -> str:
    try:
        call()
    except (ValueError, ImportError, dist.DistError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def errors() -> None:
    """Starts that must fail in the same way on all ranks."""
    say(f"before: {error_of(lambda: start_debug_server(0, TOKEN))}")
    dist.init_process_group()
    rank = dist.get_rank()
    say(f"token: {error_of(lambda: start_debug_server(0, 'short' if rank else TOKEN))}")
    say(f"nowhere: {error_of(lambda: start_debug_server(0, TOKEN, host='' if rank else 'here'))}")
    say(f"port: {error_of(lambda: start_debug_server(1.5 if rank else 0, TOKEN))}")
    say(f"worker: {error_of(lambda: start_debug_server(0, TOKEN, worker_port=65536))}")
    blocked = rank == 1
    if blocked:
        sys.modules["aiohttp"] = None  # type: ignore[assignment]
    say(f"missing: {error_of(lambda: start_debug_server(0, TOKEN))}")
    if blocked:
        del sys.modules["aiohttp"]
    address = start_debug_server(0)
    say(f"again: {error_of(lambda: start_debug_server(0, TOKEN))}")
    stop_debug_server()
    dist.barrier()
    port = int(address.split(":")[2].split("/")[0])
    assert start_debug_server(port).startswith(f"http://127.0.0.1:{port}/?token=")
    stop_debug_server()
    stop_debug_server()
    dist.barrier()
    say(f"host: {error_of(lambda: start_debug_server(0, TOKEN, host='192.0.2.1'))}")
    dist.barrier()
    say(f"end {rank}")


def main() -> None:
    kind, seconds = sys.argv[1], float(sys.argv[2]) if len(sys.argv) > 2 else 0.0
    if kind == "errors":
        return errors()
    if kind == "bridge":
        import torch.distributed as stock

        stock.init_process_group(backend="hpcdist", init_method="mpi://")
        rank = stock.get_rank()
    else:
        dist.init_process_group()
        rank = dist.get_rank()
    address = start_debug_server(0, TOKEN, worker_port=int(os.environ.get("WORKER_PORT", "0")))
    say(f"pid {rank} {os.getpid()} {address}")
    {"hang": hang, "work": work, "both": both, "bridge": bridge}[kind](rank, seconds)
    say(f"end {rank}")


if __name__ == "__main__":
    main()
