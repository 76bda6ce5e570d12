#!/usr/bin/env python
"""Peak memory of training, beside torch's DDP over gloo: fresh jobs for each figure.

    python tests/perf/ddp_memory.py
    python tests/perf/ddp_memory.py --width 1024 --layers 24 -n 4
    python tests/perf/ddp_memory.py --model tiny --repeats 9

Each job trains a module for some steps with SGD on two ranks: an MLP (--width, --layers), or one of
those of ``bench ddp``. What is printed, in MiB, is by how much the peak of a rank's resident memory
(VmHWM) lies above what it held before the module was wrapped, when the module, its optimizer, a
batch, the communication library and its threads, and what torch makes once were there (the bare
module had made a step); the highest of all ranks, and of --repeats jobs in turn the median.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

WAYS = ("hpcdist", "torch")
MODELS = ("layers", "cnn", "transformer", "tiny")
FLAGS = {"view": "gradient_as_bucket_view", "static": "static_graph"}


def status(field: str) -> float:
    """A line of /proc/self/status, in MiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"no {field} in /proc/self/status")


def train(args: argparse.Namespace) -> None:
    """One rank of a job."""
    import torch
    import torch.distributed as reference
    from torch import nn

    import hpcdist as dist
    from hpcdist.cli.bench import ddp_models

    torch.set_num_threads(1)
    dist.init_process_group()
    if args.way == "torch":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        store = reference.FileStore(args.store, dist.get_world_size())
        reference.init_process_group(
            "gloo", store=store, rank=dist.get_rank(), world_size=dist.get_world_size()
        )
    ours, theirs = dist.DistributedDataParallel, nn.parallel.DistributedDataParallel
    wrap: Callable[..., Any] = theirs if args.way == "torch" else ours
    torch.manual_seed(0)
    if args.model == "layers":
        layers = [nn.Linear(args.width, args.width) for _ in range(args.layers)]
        module = nn.Sequential(*[part for layer in layers for part in (layer, nn.ReLU())])
        x = torch.randn(8, args.width)
    else:
        _, make, batch = ddp_models.MODELS[args.model]
        module, x = make(), batch()
    library: Any = reference if args.way == "torch" else dist
    for numel in (1 << 8, 1 << 14, 1 << 20):  # what the library makes at its first calls
        warm = torch.ones(numel)
        library.broadcast(warm, 0)
        library.all_reduce(warm)
        library.all_reduce(warm, async_op=True).wait()
    del warm
    gradients = sum(p.numel() * p.itemsize for p in module.parameters()) / (1 << 20)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    module(x).square().mean().backward()
    optimizer.zero_grad()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = status("VmRSS")
    model = wrap(module, gradient_as_bucket_view=args.view, static_graph=args.static)
    for _ in range(args.steps):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    found = torch.tensor([status("VmHWM") - before], dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        print(f"RESULT {gradients:.3f} {found.item():.3f}", flush=True)
    if args.way == "torch":
        reference.destroy_process_group()
    dist.destroy_process_group()


def job(args: argparse.Namespace, model: str, way: str, flags: tuple[str, ...]) -> list[float]:
    """Start one, and read what it printed: MiB of the gradients and of the peak."""
    mpirun = Path(sys.executable).parent / "mpirun"
    launcher = str(mpirun) if mpirun.exists() else shutil.which("mpirun") or "mpirun"
    with tempfile.TemporaryDirectory() as folder:
        command = [launcher, "-n", str(args.n), sys.executable, __file__, "--way", way]
        command += ["--store", f"{folder}/store", "--width", str(args.width), "--model", model]
        command += ["--layers", str(args.layers), "--steps", str(args.steps)]
        command += [f"--{flag}" for flag in flags]
        # Otherwise glibc keeps some freed memory for later, and how much depends on the order.
        env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=env)
    for line in done.stdout.splitlines():
        if "RESULT" in line:
            return [float(word) for word in line.split()[-2:]]
    sys.exit(f"the job failed:\n{done.stdout}{done.stderr}")


def main() -> None:
    """Run all combinations and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-n", type=int, default=2)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--model", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--store", default="", help=argparse.SUPPRESS)
    for flag in FLAGS:
        parser.add_argument(f"--{flag}", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.way:
        (args.model,) = args.model
        train(args)
        return
    print(f"{'model':12} {'flags':40} {'gradients':>10} {'hpcdist':>10} {'torch':>10}  MiB")
    for model in args.model:
        for flags in ((), ("view",), ("static",), ("view", "static")):
            peaks: dict[str, list[float]] = {way: [] for way in WAYS}
            for _ in range(args.repeats):
                for way in WAYS:
                    size, peak = job(args, model, way, flags)
                    peaks[way].append(peak)
            ours, theirs = (statistics.median(peaks[way]) for way in WAYS)
            names = ", ".join(FLAGS[flag] for flag in flags) or "none"
            print(f"{model:12} {names:40} {size:10.2f} {ours:10.2f} {theirs:10.2f}", flush=True)


if __name__ == "__main__":
    main()
