"""Measure stock torch.distributed over hpcdist, beside gloo, in one run.

  all_reduce  of a few bytes: hpcdist's own function, torch's over hpcdist, and torch's over gloo
  DDP         a step of torch's own DistributedDataParallel: zero_grad, forward, backward, SGD
  FSDP2       the same with fully_shard on the parts and the whole of the module

  more        what a call takes more than hpcdist's own
  of gloo     the time over hpcdist as a part of that over gloo
  off         largest difference of a parameter from gloo's after the last step

Every time is the median over the rounds of the slowest rank's; the contenders take turns.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

from . import arguments, formats
from .ddp import ROUNDING, Trainer
from .errors import BenchError
from .job import MpiJob
from .measure import Times, interleave

COLUMNS = (
    formats.Column("case", "case", "", 24),
    formats.Column("library", "library", "", 14),
    formats.Column("time_us", "time", "us", 12, ".2f"),
    formats.Column("min_us", "min", "us", 12, ".2f"),
    formats.Column("max_us", "max", "us", 12, ".2f"),
    formats.Column("more_us", "more", "us", 9, ".2f"),
    formats.Column("of_gloo", "of gloo", "", 9, ".0%"),
    formats.Column("off", "off", "", 9, ".0e"),
    formats.Column("spread", "spread", "", 8, ".0%"),
    formats.Column("rounds"),
)

_KINDS = ("all_reduce", "DDP", "FSDP2")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument(
        "-k",
        "--kind",
        nargs="+",
        default=list(_KINDS),
        choices=_KINDS,
        metavar="KIND",
        help="all_reduce, DDP or FSDP2 (all)",
    )
    arguments.add_models(parser)
    arguments.add_measure(parser, rounds=15, calls=False)
    arguments.add_output(parser)


def run(options: argparse.Namespace) -> int:
    """Measure and print; return 1 if the backends did not reach the same parameters.

    Raises BenchError on all ranks if there is no torch, or none with gloo.
    """
    wrong = 0
    with MpiJob(options.quiet) as job:
        try:
            import torch
            import torch.distributed as torch_dist
        except ImportError:
            raise BenchError("this bench runs torch.distributed, and there is no torch") from None
        missing = not torch_dist.is_available() or not torch_dist.is_gloo_available()
        job.require("this torch was built without gloo" if missing else None)
        from .ddp_models import MODELS

        torch.set_num_threads(options.threads)
        groups = _groups(job)
        table = formats.Table(job, COLUMNS, options.format, options.output)
        table.begin(job.facts())
        if "all_reduce" in options.kind:
            table.section("all_reduce(torch.Tensor)")
            _latencies(job, table, groups, options)
        kinds = [kind for kind in _KINDS[1:] if kind in options.kind]
        models = options.model if kinds else []
        for index, name in enumerate(models):
            job.progress(index, len(models), f"the model {name}")
            what, *make = MODELS[name]
            table.section(f"{name}: {what}")
            for kind in kinds:
                wraps = {each: _wrap(kind, group) for each, group in groups.items()}
                wrong += not _steps(job, table, f"{kind} {name}", make, wraps, options)
        if wrong:
            table.note(f"{wrong} cases with different parameters")
        table.end()
        torch_dist.destroy_process_group()
    return 1 if wrong else 0


def _groups(job: MpiJob) -> dict[str, Any]:
    """torch's groups of all ranks: over hpcdist and over gloo."""
    import os
    import socket

    import torch.distributed as torch_dist

    from hpcdist import torch as bridge

    if len(set(job.gather(socket.gethostname()))) == 1:
        # a host's name need not be an address of it; within a node loopback is gloo's best
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    ours = bridge.to_torch()
    return {"hpcdist": ours, "gloo": torch_dist.new_group(backend="gloo")}


def _latencies(
    job: MpiJob, table: formats.Table, groups: dict[str, Any], options: argparse.Namespace
) -> None:
    """Small messages, where the layers above the engine are most of the time."""
    import torch
    import torch.distributed as torch_dist

    from hpcdist.collectives.reduce import all_reduce

    def calls(function: Callable[[], Any]) -> Callable[[int], None]:
        def batch(count: int) -> None:
            for _ in range(count):
                function()

        return batch

    for size in (8, 4096):
        tensor = torch.zeros(size // 4)
        contenders = {"native": calls(partial(all_reduce, tensor))}
        for name, group in groups.items():
            contenders[name] = calls(partial(torch_dist.all_reduce, tensor, group=group))
        times = interleave(job, contenders, options.rounds, options.warmup)
        for name, found in times.items():
            row = _row(f"all_reduce {formats.short(size)}", name, found, times["gloo"], options)
            row["more_us"] = (found.median - times["native"].median) * 1e6
            table.row(row)


def _wrap(kind: str, group: Any) -> Callable[[Any], Any]:
    """What makes a module data parallel over a group."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    if kind == "DDP":
        return partial(DistributedDataParallel, process_group=group)
    mesh = DeviceMesh.from_group(group, "cpu")

    def shard(module: Any) -> Any:
        for part in module.children():
            if sum(1 for _ in part.parameters()):
                # a list of modules is never called itself
                parts = part if type(part).__name__ == "ModuleList" else [part]
                for each in parts:
                    if type(part).__name__ != "ParameterList":
                        fully_shard(each, mesh=mesh)
        return fully_shard(module, mesh=mesh)

    return shard


def _steps(
    job: MpiJob,
    table: formats.Table,
    case: str,
    make: Any,
    wraps: dict[str, Callable[[Any], Any]],
    options: argparse.Namespace,
) -> bool:
    """One model in one way; returns whether both backends came to the same parameters."""
    trainers = {name: Trainer(make, wrap, job.rank) for name, wrap in wraps.items()}
    for trainer in trainers.values():
        trainer(2)  # buckets are rebuilt after the first step, and connections are made in it
    times = interleave(job, trainers, options.rounds, max(2, options.warmup), calls=1)
    reference = trainers["gloo"].parameters()
    apart = (trainers["hpcdist"].parameters() - reference).abs()
    off = float(
        job.worst([float(apart.max()) if apart.numel() else 0.0])[0]
    )  # of shards one may be empty
    for name, found in times.items():
        row = _row(case, name, found, times["gloo"], options)
        row["off"] = off if name == "hpcdist" else None
        table.row(row)
    return off <= ROUNDING


def _row(
    case: str, name: str, found: Times, gloo: Times, options: argparse.Namespace
) -> dict[str, Any]:
    return {
        "case": case,
        "library": name,
        "time_us": found.median * 1e6,
        "min_us": found.least * 1e6,
        "max_us": found.most * 1e6,
        "more_us": None,
        "of_gloo": found.median / gloo.median,
        "off": None,
        "spread": found.spread,
        "rounds": options.rounds,
    }
