#!/usr/bin/env python
"""Peak memory of training, beside torch's DDP over gloo: one fresh job for each line.

    python tests/perf/ddp_memory.py
    python tests/perf/ddp_memory.py --width 1024 --layers 24 -n 4

Each job trains an MLP for some steps with SGD on two ranks. What is printed, in MiB, is by how much
the peak of a rank's resident memory (VmHWM) lies above what it held before it was wrapped, when the
module, its optimizer, a batch and the communication library were there; the highest of all ranks.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

WAYS = ("hpcdist", "torch")


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
    layers = [nn.Linear(args.width, args.width) for _ in range(args.layers)]
    module = nn.Sequential(*[part for layer in layers for part in (layer, nn.ReLU())])
    x = torch.randn(8, args.width)
    warm = torch.ones(1 << 20)
    if args.way == "torch":
        reference.all_reduce(warm)
    else:
        dist.all_reduce(warm)
    del warm
    gradients = sum(p.numel() * p.itemsize for p in module.parameters()) / (1 << 20)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    optimizer.zero_grad()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = status("VmRSS")
    model = wrap(module, gradient_as_bucket_view=args.view, static_graph=args.static)
    for _ in range(args.steps):
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
    found = torch.tensor([status("VmHWM") - before], dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        print(f"RESULT {gradients:.1f} {found.item():.1f}", flush=True)
    if args.way == "torch":
        reference.destroy_process_group()
    dist.destroy_process_group()


def job(args: argparse.Namespace, way: str, view: bool, static: bool) -> tuple[float, float]:
    """Start one, and read what it printed."""
    mpirun = Path(sys.executable).parent / "mpirun"
    launcher = str(mpirun) if mpirun.exists() else shutil.which("mpirun") or "mpirun"
    with tempfile.TemporaryDirectory() as folder:
        command = [launcher, "-n", str(args.n), sys.executable, __file__, "--way", way]
        command += ["--store", f"{folder}/store", "--width", str(args.width)]
        command += ["--layers", str(args.layers), "--steps", str(args.steps)]
        command += ["--view"] * view + ["--static"] * static
        # Otherwise glibc keeps some freed memory for later, and how much depends on the order.
        env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=env)
    for line in done.stdout.splitlines():
        if "RESULT" in line:
            gradients, peak = line.split()[-2:]
            return float(gradients), float(peak)
    sys.exit(f"the job failed:\n{done.stdout}{done.stderr}")


def main() -> None:
    """Run all combinations and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-n", type=int, default=2)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--way", choices=WAYS)
    parser.add_argument("--store", default="")
    parser.add_argument("--view", action="store_true")
    parser.add_argument("--static", action="store_true")
    args = parser.parse_args()
    if args.way:
        train(args)
        return
    print(f"{'flags':40} {'gradients':>10} {'hpcdist':>10} {'torch':>10}  MiB")
    for view, static in ((False, False), (True, False), (False, True), (True, True)):
        flags = ", ".join(
            name for name, on in (("gradient_as_bucket_view", view), ("static_graph", static)) if on
        )
        found = [job(args, way, view, static) for way in WAYS]
        print(f"{flags or 'none':40} {found[0][0]:10.1f} {found[0][1]:10.1f} {found[1][1]:10.1f}")


if __name__ == "__main__":
    main()
