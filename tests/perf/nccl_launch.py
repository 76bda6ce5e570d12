#!/usr/bin/env python
"""What it costs to start an all_reduce of one rank over NCCL, beside a loop in C.

    python tests/perf/nccl_launch.py

NCCL is the stand-in of tests/standin, whose ncclAllReduce puts a task into a stream's queue; its
functions for events have the driver's signatures and do the same. These take turns:

- a loop in C;
- the binding, ``Communicator.all_reduce`` with numbers for the addresses;
- ``hpcdist.all_reduce`` of a tensor on the current stream;
- the same in a group that also has a backend for the host;
- a loop in C that records an event after each operation, as every call but the binding's has to;
- the same call with ``async_op=True``, and with ``wait()`` after it;
- a loop in C that does what those do with the two streams: four calls about events, besides NCCL.

Printed: the median and the least of the rounds, of the time of one call, and by how much that is
above the loop's. On a machine with other work only the least tells what the call itself costs.
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
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import standin
import torch

import hpcdist as dist
from hpcdist import _nccl
from hpcdist.backends import cuda as device
from hpcdist.backends import dispatch

#: Seconds that the stream is busy with something else meanwhile, as a GPU's is: nothing waits for
#: what is enqueued, so that waking a thread is not measured.
BUSY = 0.005


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


def measure(
    ways: dict[str, Callable[[], float]], rounds: int, stream: standin.Stream, group: Any
) -> dict[str, list[float]]:
    """Seconds per call in each round; the ways take turns."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    order = list(ways)
    for _ in range(rounds):
        order.append(order.pop(0))  # what comes after another must not always be the same
        for name in order:
            stream.kernel(BUSY)
            found[name].append(ways[name]())
            stream.synchronize()
            group.queue.drain(10.0)
    return found


def show(found: dict[str, list[float]]) -> None:
    """Print a table: microseconds, also above those of the loop in C."""
    loops = found["loop in C"]
    print(f"{'':<26}{'median':>8}{'above C':>9}{'least':>8}{'above C':>9}")
    for name, seconds in found.items():
        line = f"{name:<24}us"
        for of in (statistics.median, min):
            line += f"{of(seconds) * 1e6:8.2f}{(of(seconds) - of(loops)) * 1e6:+9.2f}"
        print(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--calls", type=int, default=200, help="in a round")
    options = parser.parse_args()
    standin.load()
    device.use(standin.Runtime())
    folder = tempfile.mkdtemp()
    store = dist.FileStore(os.path.join(folder, "store"), 1)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id="cuda:0")
    group = dist.group.WORLD.carrier
    both = dispatch.Dispatch({"cpu": object(), "cuda": group})
    comm = group.communicators.usable(0)
    tensor = torch.ones(1).as_subclass(Plain)
    at, stream = tensor.data_ptr(), standin.Stream(0)
    library, calls = standin.library(), options.calls

    def loop(records: int) -> float:
        took = library.standin_loop(
            comm.handle, at, 1, _nccl.FLOAT32, _nccl.SUM, None, calls, records
        )
        assert took >= 0
        return took / calls

    def binding() -> None:
        comm.all_reduce(at, at, 1, _nccl.FLOAT32, _nccl.SUM, 0)

    other = standin.Stream()

    def apart() -> float:
        took = library.standin_loop_apart(
            comm.handle, at, 1, _nccl.FLOAT32, _nccl.SUM, None, other.handle, calls
        )
        assert took >= 0
        return took / calls

    ways: dict[str, Callable[[], float]] = {
        "loop in C": lambda: loop(0),
        "loop in C with events": lambda: loop(1),
        "Communicator.all_reduce": lambda: timed(binding, calls),
        "hpcdist.all_reduce": lambda: timed(lambda: dist.all_reduce(tensor), calls),
        "of two backends": lambda: timed(lambda: both.all_reduce(tensor), calls),
        "loop in C, two streams": apart,
        "async_op": lambda: timed(lambda: dist.all_reduce(tensor, async_op=True), calls),
        "async_op, wait()": lambda: timed(
            lambda: dist.all_reduce(tensor, async_op=True).wait(), calls
        ),
    }
    show(measure(ways, options.rounds, stream, group))
    dist.destroy_process_group()


main()
