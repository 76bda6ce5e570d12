#!/usr/bin/env python
"""A training step of hpcdist's DDP on one GPU, beside torch's over its own NCCL.

    python tests/gpu/steps.py transformer eager
    python tests/gpu/steps.py resnet compiled
    python tests/gpu/steps.py resnet eager --device cpu --small   # tries this program, over gloo

Three trainers take turns: the bare module, torch's DDP, hpcdist's. All start from the same
parameters and take the same number of steps on the same batch, with deterministic kernels, so
in the end their parameters must be the same to the last bit.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

import torch
from steps_models import Task, task
from torch import nn
from torch.nn import functional as F

LIBRARIES = ("alone", "torch", "hpcdist")
VARIANTS = ("eager", "compiled", "graph")
#: Steps before the measurement. DDP builds its buckets again after the first; torch asks for eleven
#: before a capture.
WARM = 11


def settle(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def wrap(library: str, module: nn.Module, device: str) -> nn.Module:
    """The module under a library's DDP, each in a world of one."""
    if library == "alone":
        return module
    ids = [0] if device == "cuda" else None
    if library == "torch":
        import torch.distributed as td

        if not td.is_initialized():
            name = "nccl" if device == "cuda" else "gloo"
            td.init_process_group(name, store=td.HashStore(), rank=0, world_size=1)
        return nn.parallel.DistributedDataParallel(module, device_ids=ids)
    import hpcdist as dist

    if not dist.is_initialized():
        name = "nccl" if device == "cuda" else "mpi"
        dist.init_process_group(name, store=dist.HashStore(), rank=0, world_size=1)
    return dist.DistributedDataParallel(module, device_ids=ids)


def leave() -> None:
    """End both worlds."""
    import torch.distributed as td

    import hpcdist as dist

    td.destroy_process_group()
    dist.destroy_process_group()


class Trainer:
    """A module under a library, its optimizer, and its step.

    Parameters
    ----------
    library, variant, device : str
        Of the lists above.
    made : Task
        What to train.
    """

    def __init__(self, library: str, variant: str, device: str, made: Task) -> None:
        self.task, self.device = made, device
        module = made.module
        inner = torch.compile(module) if variant == "compiled" else module
        side = torch.cuda.Stream() if variant == "graph" else None
        settle(device)  # the module was made on another stream
        with torch.cuda.stream(side):
            self.model = wrap(library, inner, device)
            self.optimizer = torch.optim.SGD(module.parameters(), lr=1e-3, momentum=0.9)
            for _ in range(WARM):
                self._step()
        settle(device)
        self.step: Callable[[], None] = self._step
        if variant == "graph":
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=side):
                self._step()
            self.step = graph.replay

    def _step(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast(self.device, torch.bfloat16, enabled=self.task.autocast):
            loss = F.cross_entropy(self.model(self.task.inputs), self.task.targets)
        loss.backward()
        self.optimizer.step()


def differs(one: Trainer, other: Trainer) -> float:
    """Largest difference of a parameter; 0 only if all are the same to the last bit."""
    worst = 0.0
    pairs = zip(one.task.module.parameters(), other.task.module.parameters(), strict=True)
    for a, b in pairs:
        if not torch.equal(a.detach().view(torch.uint8), b.detach().view(torch.uint8)):
            worst = max(worst, float((a.detach() - b.detach()).abs().max()), 1e-45)
    return worst


def build(model: str, variant: str, device: str, small: bool) -> tuple[dict, dict]:
    """The trainers, and MiB of memory that each took at most, with what it keeps."""
    peaks: dict[str, float] = {}
    trainers: dict[str, Trainer] = {}
    for library in LIBRARIES:
        before = torch.cuda.memory_allocated() if device == "cuda" else 0
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        trainers[library] = Trainer(library, variant, device, task(model, device, small))
        after = torch.cuda.max_memory_allocated() if device == "cuda" else 0
        peaks[library] = (after - before) / (1 << 20)
        print(library, "is built", flush=True)
    return trainers, peaks


def deterministic(warns: bool) -> None:
    """The same bits in each run of the same step, and no filling of fresh memory for it.

    With `warns` what cannot be so is done all the same. Attention then is not, though it can be.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=warns)
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.backends.cudnn.benchmark = False


def compare(model: str, variant: str, device: str, small: bool, rounds: int = 15) -> str:
    """Train by turns and say what a step takes; an error if the parameters differ."""
    deterministic(warns=model == "resnet")
    if variant == "graph":  # torch's own condition for capturing its DDP
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    trainers, peaks = build(model, variant, device, small)
    taken: dict[str, list[float]] = {name: [] for name in LIBRARIES}
    for _ in range(rounds):
        for name, trainer in trainers.items():
            settle(device)
            began = time.perf_counter()
            for _ in range(1 if small else 4):
                trainer.step()
            settle(device)
            taken[name].append((time.perf_counter() - began) / (1 if small else 4))
    times = {name: statistics.median(seconds) * 1e3 for name, seconds in taken.items()}
    figures = "step {alone:.2f} alone, {torch:.2f} torch, {hpcdist:.2f} ms hpcdist".format(**times)
    memory = "peak {alone:.0f} alone, {torch:.0f} torch, {hpcdist:.0f} MiB hpcdist".format(**peaks)
    more = 100 * (times["hpcdist"] / times["torch"] - 1)
    off = differs(trainers["hpcdist"], trainers["torch"])
    said = f"{figures} ({more:+.1f} % of torch), {memory}"
    if off:
        noise = differs(trainers["torch"], trainers["alone"])
        raise AssertionError(
            f"parameters differ from torch's by up to {off:.1e}, torch's from the bare module's "
            f"by {noise:.1e}; {said}"
        )
    return f"{said}, parameters bitwise equal"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", choices=("resnet", "transformer"))
    parser.add_argument("variant", choices=VARIANTS)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny modules, to try the program")
    chosen = parser.parse_args()
    said = compare(chosen.model, chosen.variant, chosen.device, chosen.small)
    leave()
    print("RESULT\n" + said)


if __name__ == "__main__":
    main()
