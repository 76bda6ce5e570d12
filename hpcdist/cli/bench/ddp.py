"""Measure a training step of DistributedDataParallel, beside torch's own over gloo.

Both train the same module from the same start on the same data, in turn, in one run:

  step      zero_grad, forward, backward and an SGD step
  forward, backward, optim
            its parts; backward holds what communication it does not hide
  added     the step less that of the bare module: what data parallelism costs
  buckets   the all_reduces of the gradient buckets alone, nothing beside them
  hook      per parameter, what a step costs more than the bare module's when each rank is a group
            of its own: hooks and packing, without communication
  peak      most memory that making a second such model and three steps took, gradients included
  off       largest difference of a parameter from hpcdist's after the last step

Every time is the median over the rounds of the slowest rank's. The libraries' words: hpcdist and
gloo are the two DDPs with default flags, alone is the bare module, "view" adds
gradient_as_bucket_view=True.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import re
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from . import arguments, formats
from .errors import BenchError
from .job import MpiJob
from .libraries import Gloo
from .library import open_libraries
from .measure import Times, interleave

COLUMNS = (
    formats.Column("model", "model", "", 12),
    formats.Column("parameters"),
    formats.Column("library", "library", "", 13),
    formats.Column("step_ms", "step", "ms", 9, ".2f"),
    formats.Column("forward_ms", "forward", "ms", 9, ".2f"),
    formats.Column("backward_ms", "backward", "ms", 9, ".2f"),
    formats.Column("optimizer_ms", "optim", "ms", 8, ".2f"),
    formats.Column("added_ms", "added", "ms", 8, ".2f"),
    formats.Column("buckets_ms", "buckets", "ms", 8, ".2f"),
    formats.Column("hook_us", "hook", "us/par", 8, ".1f"),
    formats.Column("peak_mib", "peak", "MiB", 8, ".1f"),
    formats.Column("off", "off", "", 9, ".0e"),
    formats.Column("spread", "spread", "", 8, ".0%"),
    formats.Column("rounds"),
)

_MIB = 1 << 20
# Parameters from which the cost of one stands out from the noise of a step.
_MANY = 500
# Largest difference between the two libraries' parameters that rounding explains.
ROUNDING = 1e-4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    arguments.add_models(parser)
    arguments.add_measure(parser, rounds=15, calls=False)
    arguments.add_output(parser)


def run(options: argparse.Namespace) -> int:
    """Measure and print; return 1 if the libraries did not reach the same parameters.

    Raises BenchError on all ranks if there is no torch.
    """
    wrong = 0
    with MpiJob(options.quiet) as job:
        try:
            import torch
        except ImportError:
            raise BenchError("this bench trains torch modules, and there is no torch") from None
        from .ddp_models import MODELS

        torch.set_num_threads(options.threads)
        table = formats.Table(job, COLUMNS, options.format, options.output)
        table.begin(job.facts())
        libraries = open_libraries(job, table, (Gloo,), ["gloo"])
        makers = _makers(job, with_gloo=bool(libraries))
        for index, name in enumerate(options.model):
            job.progress(index, len(options.model), f"the model {name}")
            what, *make = MODELS[name]
            table.section(f"{name}: {what}")
            wrong += not _rows(job, table, name, make, makers, options)
        if wrong:
            table.note(f"{wrong} models with different parameters")
        table.end()
        for library in libraries:
            library.close()
    return 1 if wrong else 0


Wrap = Callable[[Any], Any]
#: What makes a module, and what makes the input of a step.
Make = Sequence[Callable[[], Any]]


def _makers(job: MpiJob, with_gloo: bool) -> dict[str, tuple[Wrap, Wrap]]:
    """Library -> (its DDP on all ranks, its DDP on a group of this rank alone)."""
    from hpcdist.groups.new_group import new_group
    from hpcdist.parallel import DistributedDataParallel

    own = new_group([job.rank])
    found: dict[str, tuple[Wrap, Wrap]] = {}
    view: dict[str, Any]
    for word in ("", " view"):
        view = {"gradient_as_bucket_view": bool(word)}
        found[f"hpcdist{word}"] = (
            partial(DistributedDataParallel, **view),
            partial(DistributedDataParallel, process_group=own, **view),
        )
    if with_gloo:
        import torch.distributed as torch_dist
        from torch.nn.parallel import DistributedDataParallel as TorchDDP

        alone = [torch_dist.new_group([rank]) for rank in range(job.size)][job.rank]
        for word in ("", " view"):
            view = {"gradient_as_bucket_view": bool(word)}
            found[f"gloo{word}"] = (
                partial(TorchDDP, **view),
                partial(TorchDDP, process_group=alone, **view),
            )
    return found


class Trainer:
    """A model, its optimizer, and the times of the parts of its steps.

    Parameters
    ----------
    make : sequence of callable
        What makes the module, and the input of a step.
    wrap : callable
        What makes it data parallel.
    rank : int
        Each rank's input is its own.
    """

    def __init__(self, make: Make, wrap: Wrap, rank: int) -> None:
        import torch

        torch.manual_seed(0)
        module = make[0]()
        torch.manual_seed(1 + rank)
        self.input = make[1]()
        self.model = wrap(module)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.parts: list[tuple[float, float, float]] = []

    def __call__(self, steps: int) -> None:
        """Train for so many steps."""
        clock = time.perf_counter
        for _ in range(steps):
            began = clock()
            self.optimizer.zero_grad()
            loss = self.model(self.input).square().mean()
            forward = clock()
            loss.backward()
            backward = clock()
            self.optimizer.step()
            self.parts.append((forward - began, backward - forward, clock() - backward))

    def medians(self, job: MpiJob) -> np.ndarray:
        """The slowest rank's medians of forward, backward and optimizer, in seconds."""
        return job.worst([statistics.median(part) for part in zip(*self.parts, strict=True)])

    def parameters(self) -> Any:
        """All parameters that this rank holds, end to end; of sharded ones its own part."""
        import torch

        own = (getattr(p, "to_local", lambda p=p: p)() for p in self.model.parameters())
        return torch.cat([p.detach().flatten() for p in own])


def _rows(
    job: MpiJob,
    table: formats.Table,
    name: str,
    make: Make,
    makers: dict[str, tuple[Wrap, Wrap]],
    options: argparse.Namespace,
) -> bool:
    """One model with all libraries; returns whether they came to the same parameters."""
    # First, while nothing of this model exists yet; and of a second such model, because libraries
    # share some of what they make once per process, and the first to run pays for it.
    wraps = {"alone": lambda m: m, **{library: wrap for library, (wrap, _) in makers.items()}}
    for wrap in wraps.values():
        Trainer(make, wrap, job.rank)(3)
    peaks = {library: _peak(job, make, wrap) for library, wrap in wraps.items()}
    bare = Trainer(make, lambda m: m, job.rank)
    whole = {library: Trainer(make, wrap, job.rank) for library, (wrap, _) in makers.items()}
    count = sum(1 for _ in bare.model.parameters())
    single = {}
    if count >= _MANY:
        single = {each: Trainer(make, wrap, job.rank) for each, (_, wrap) in makers.items()}
    contenders: dict[str, Trainer] = {"alone": bare}
    contenders.update(whole)
    contenders.update({f"{library}, one rank": trainer for library, trainer in single.items()})
    # Buckets are rebuilt after the first step, and gloo's connections are made in it.
    warmup = max(2, options.warmup)
    for trainer in contenders.values():
        trainer(2)
        trainer.parts.clear()
    times = interleave(job, contenders, options.rounds, warmup, calls=1)
    buckets = {f"buckets {each}": _buckets(each, whole[each].model) for each in makers}
    for batch in buckets.values():
        batch(2)
    alone_times = interleave(job, buckets, options.rounds, warmup, calls=1)
    equal = _print_rows(job, table, name, count, contenders, times, alone_times, peaks, options)
    del bare, whole, single, contenders, trainer, buckets
    return equal


def _print_rows(
    job: MpiJob,
    table: formats.Table,
    name: str,
    count: int,
    trainers: dict[str, Trainer],
    times: dict[str, Times],
    bucket_times: dict[str, Times],
    peaks: dict[str, float | None],
    options: argparse.Namespace,
) -> bool:
    """Print one model's rows; returns whether all libraries came to the same parameters."""
    reference = trainers["hpcdist"].parameters()
    equal = True
    for library in peaks:
        trainer = trainers[library]
        forward, backward, optimizer = trainer.medians(job) * 1e3
        row = {
            "model": name,
            "parameters": count,
            "library": library,
            "step_ms": times[library].median * 1e3,
            "forward_ms": forward,
            "backward_ms": backward,
            "optimizer_ms": optimizer,
            "added_ms": None,
            "buckets_ms": None,
            "hook_us": None,
            "peak_mib": peaks[library],
            "off": None,
            "spread": times[library].spread,
            "rounds": options.rounds,
        }
        if library != "alone":
            base = times["alone"].median
            off = float(job.worst([float((trainer.parameters() - reference).abs().max())])[0])
            equal &= off <= ROUNDING
            row["added_ms"] = (times[library].median - base) * 1e3
            row["buckets_ms"] = bucket_times[f"buckets {library}"].median * 1e3
            if count >= _MANY:
                row["hook_us"] = (times[f"{library}, one rank"].median - base) / count * 1e6
            row["off"] = off
        table.row(row)
    return equal


def _buckets(library: str, model: Any) -> Callable[[int], None]:
    """All-reduce tensors of the sizes of a DDP's buckets, and wait for them."""
    import torch

    data = model._get_ddp_logging_data()
    text = str(data.get("rebuilt_bucket_sizes") or data.get("bucket_sizes"))
    tensors = [torch.zeros(int(size) // 4) for size in re.findall(r"\d+", text)]
    reduce: Callable[..., Any]
    if library.startswith("hpcdist"):
        from hpcdist.collectives.reduce import all_reduce as reduce
    else:
        from torch.distributed import all_reduce as reduce

    def run(calls: int) -> None:
        for _ in range(calls):
            for work in [reduce(tensor, async_op=True) for tensor in tensors]:
                work.wait()

    return run


def _peak(job: MpiJob, make: Make, wrap: Wrap) -> float | None:
    """MiB that making a model and three steps took at most; None where Linux does not tell."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        before = None
    else:
        before = _status("VmRSS")
    job.barrier()
    trainer = Trainer(make, wrap, job.rank)
    trainer(3)
    job.barrier()
    after = _status("VmHWM")
    del trainer
    worst = float(job.worst([np.inf if before is None else (after - before) / _MIB])[0])
    return None if worst == np.inf else worst


def _status(field: str) -> int:
    """A line of /proc/self/status, in bytes."""
    match = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.M)
    if match is None:
        raise BenchError(f"/proc/self/status has no {field}")
    return int(match[1]) * 1024
