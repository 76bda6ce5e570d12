#!/usr/bin/env python
"""How much of DDP's communication hides behind backward.

    mpirun -n 2 python tests/perf/ddp_overlap.py
    sudo python tests/perf/netns.py -- tests/perf/ddp_overlap.py --model head --buckets 1

The gradients fill `--buckets` buckets of 25 MiB. `--model even` is a stack of linear layers: all
gradients come at the same pace, and that of the last bucket's hides behind nothing. `--model head`
is a stack of convolutions with few parameters and linear layers behind them, as VGG is: the
gradients come at the beginning of backward, whose rest hides them. The batch is chosen so
that its backward alone takes `--backward` seconds. Printed, in ms (medians): backward alone (under
no_sync), the all-reduces of the buckets alone, backward with them, and by how much the latter is
longer than the longer of the two.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

import hpcdist as dist
from hpcdist.parallel.reducer import schedule
from hpcdist.parallel.reducer.bucket import MIB


def timed(call: Callable[[], float], rounds: int) -> float:
    """Median of the seconds a call reports, over rounds that begin together; slowest rank."""
    seconds = []
    for _ in range(rounds):
        dist.barrier()
        seconds.append(call())
    found = torch.tensor([statistics.median(seconds)], dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.item()


def build(model: str, buckets: int, width: int) -> tuple[nn.Module, tuple[int, ...]]:
    """Return the network and the shape of one sample."""
    count = round(buckets * 25 * MIB / (4 * width * width))
    layers = [nn.Linear(width, width, bias=False) for _ in range(count)]
    if model == "even":
        return nn.Sequential(*layers), (width,)
    front: list[nn.Module] = []
    for channels in (3, *[64] * 7):
        front += [nn.Conv2d(channels, 64, 3, padding=1), nn.ReLU()]
    layers[0] = nn.Linear(64 * 4 * 4, width, bias=False)
    pool = [nn.AdaptiveAvgPool2d(4), nn.Flatten()]
    return nn.Sequential(*front, *pool, *layers), (3, 32, 32)


def main() -> None:
    """Calibrate, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=("even", "head"), default="even")
    parser.add_argument("--buckets", type=int, default=2)
    parser.add_argument("--width", type=int, default=1024, help="of a layer: 1024 has 4 MiB")
    parser.add_argument("--piece", type=float, default=None, help="MiB reduced at a time")
    parser.add_argument("--backward", type=float, default=0.1)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--first", type=float, default=None, help="cap of the first bucket, MiB")
    args = parser.parse_args()
    dist.init_process_group()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if args.piece is not None:
        schedule._PIECE = int(args.piece * MIB)
    module, sample = build(args.model, args.buckets, args.width)
    caps = None if args.first is None else [args.first, 25]
    model = dist.DistributedDataParallel(
        module, gradient_as_bucket_view=True, bucket_cap_mb_list=caps
    )

    def backward(x: torch.Tensor, sync: bool) -> float:
        model.zero_grad()
        model.require_backward_grad_sync = sync
        loss = model(x).sum()
        dist.barrier()
        began = time.perf_counter()
        loss.backward()
        return time.perf_counter() - began

    batch = 8
    for _ in range(3):  # to the wanted time, which is nearly proportional to the batch
        seconds = timed(partial(backward, torch.ones(batch, *sample), False), 3)
        batch = max(1, round(batch * args.backward / seconds))
    x = torch.ones(batch, *sample)
    for _ in range(2):
        backward(x, True)

    def communicate() -> float:
        began = time.perf_counter()
        works = [
            dist.all_reduce(bucket.buffer, dist.ReduceOp.AVG, async_op=True)
            for bucket in model.reducer.buckets
        ]
        for work in works:
            work.wait()
        return time.perf_counter() - began

    compute = timed(lambda: backward(x, False), args.rounds)
    alone = timed(communicate, args.rounds)
    both = timed(lambda: backward(x, True), args.rounds)
    if dist.get_rank() == 0:
        sizes = ", ".join(f"{bucket.nbytes / MIB:.0f}" for bucket in model.reducer.buckets)
        print(f"buckets of {sizes} MiB, batch {batch}")
        print(
            f"backward {compute * 1e3:.1f}   communication {alone * 1e3:.1f}   "
            f"both {both * 1e3:.1f} ms   {both / max(compute, alone):.2f} x the longer"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
