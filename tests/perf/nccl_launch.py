#!/usr/bin/env python
"""What it costs to start an all_reduce of one rank over NCCL, beside a loop in C.

    python tests/perf/nccl_launch.py

NCCL is the stand-in of tests/nccl, whose ncclAllReduce puts a task into a stream's queue. Four ways
to call it take turns: a loop in C; the binding, ``Communicator.all_reduce`` with numbers for the
addresses; ``hpcdist.all_reduce`` of a tensor on the stream that is current; and the same with
``async_op=True`` and ``wait()``. Printed: medians over rounds of the time of one call, and by how
much it is above the loop. The stand-ins for streams and events are called through ctypes, unlike
torch's own: ``of that ctypes`` is what those calls cost by themselves.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import standin
import torch

import hpcdist as dist
from hpcdist import _nccl
from hpcdist.backends.nccl import device


class Plain(torch.Tensor):
    """A tensor that says it is on a GPU, at the price of a real one's ``device``."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    device = torch.device("cuda", 0)


def timed(call: Callable[[], object], calls: int) -> float:
    """Seconds of one call."""
    began = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - began) / calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--calls", type=int, default=50, help="in a round")
    options = parser.parse_args()
    standin.load()
    device.use(standin.Runtime())
    folder = tempfile.mkdtemp()
    store = dist.FileStore(os.path.join(folder, "store"), 1)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id="cuda:0")
    group = dist.group.WORLD._comm
    comm = group.communicator(0)
    tensor = torch.ones(1).as_subclass(Plain)
    at, stream, runtime = tensor.data_ptr(), standin.Stream(0), device.runtime()
    library, calls = standin.library(), options.calls
    handle = _nccl.SUM

    def loop() -> float:
        took = library.standin_loop(comm.handle, at, 1, _nccl.FLOAT32, handle, None, calls)
        assert took >= 0
        return took / calls

    def binding() -> None:
        comm.all_reduce(at, at, 1, _nccl.FLOAT32, _nccl.SUM, 0)

    def events() -> None:
        # what a synchronous call needs of the streams: the current one, and an event in it
        current = runtime.current(0)
        runtime.handle(current)
        runtime.event_handle(runtime.record(current))

    ways: dict[str, Callable[[], float]] = {
        "loop in C": loop,
        "Communicator.all_reduce": lambda: timed(binding, calls),
        "hpcdist.all_reduce": lambda: timed(lambda: dist.all_reduce(tensor), calls),
        "async_op, wait()": lambda: timed(
            lambda: dist.all_reduce(tensor, async_op=True).wait(), calls
        ),
        "of that ctypes": lambda: timed(events, calls),
    }
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(options.rounds):
        for name, way in ways.items():
            found[name].append(way())
            stream.synchronize()
            group.drain(10.0)
    base = statistics.median(found["loop in C"])
    for name, seconds in found.items():
        median = statistics.median(seconds)
        print(f"{name:<24}{median * 1e6:8.2f} us{(median - base) * 1e6:+8.2f}")
    dist.destroy_process_group()


main()
