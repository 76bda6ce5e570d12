"""The program that test_job.py runs: benches one after the other, their tables in a folder.

mpirun -n 2 python benches.py FOLDER
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

from hpcdist.cli import main
from hpcdist.cli.bench import libraries


class Corrupt(libraries.Hpcdist):
    """hpcdist, with one element spoilt on the last rank."""

    name = "corrupt"

    def batch(self, case):
        inner = super().batch(case)

        def run(calls: int) -> None:
            inner(calls)
            if case.rank == case.ranks - 1:
                case.recv.view(-1)[-1] += 1

        return run


def spoilt(job, with_gloo):
    """hpcdist's DDP, and one that begins with another parameter."""
    import torch

    from hpcdist.groups.new_group import new_group
    from hpcdist.parallel import DistributedDataParallel

    own = new_group([job.rank])

    def wrap(module, **arguments):
        with torch.no_grad():
            next(module.parameters()).add_(1)
        return DistributedDataParallel(module, **arguments)

    return {
        name: (kind, partial(kind, process_group=own))
        for name, kind in (("hpcdist", DistributedDataParallel), ("spoilt", wrap))
    }


def run(folder: Path) -> None:
    codes = {}

    def bench(name: str, form: str, *arguments: str) -> None:
        path = str(folder / name)
        codes[name] = main(["bench", *arguments, "--format", form, "-o", path, "-q"])

    small = ["-n", "2", "-w", "1", "-c", "2"]
    sys.modules["mpi4py"] = None  # type: ignore[assignment]  # as if it were not installed
    bench("missing.nccl", "nccl", "all_reduce", "-e", "8", "-l", "mpi4py", "hpcdist", *small)
    del sys.modules["mpi4py"]
    sizes = ["-b", "4", "-e", "9K", "-f", "2000"]
    bench("all.csv", "csv", "all", *sizes, "-d", "float32", "bfloat16", *small)
    redops = ["-O", "SUM", "avg", "PRODUCT", "MAX"]
    bench("ops.json", "json", "all_reduce", "reduce_scatter_tensor", "-e", "64", *redops, *small)
    bench("ints.json", "json", "reduce", "-e", "64", "-d", "int8", "bool", "-O", "BXOR", *small)
    bench("async.json", "json", "all", "-e", "64", "-l", "hpcdist-async", "hpcdist-fast", *small)
    plot = ["--plot", str(folder / "plot.svg")]
    bench("table.osu", "osu", "broadcast", "-b", "8", "-e", "512", "-f", "8", *plot, *small)
    bench("p2p.json", "json", "p2p", "-b", "8", "-e", "100K", "-f", "999", *small)
    bench("overlap.json", "json", "overlap", "-s", "100K", "--matrix", "64", "-n", "2")
    bench("torch.json", "json", "torch", "-m", "cnn", "tiny", "-n", "2", "-w", "1")
    step = ["-n", "2", "-w", "1"]
    bench("ddp.json", "json", "ddp", "-m", "cnn", "tiny", *step)
    from hpcdist.cli.bench import ddp

    ddp._makers = spoilt  # type: ignore[assignment]
    bench("spoilt.nccl", "nccl", "ddp", "-m", "cnn", *step)
    bench("spoilt.csv", "csv", "ddp", "-m", "cnn", *step)
    libraries.LIBRARIES = (Corrupt,)
    from hpcdist.cli.bench import collectives

    collectives.LIBRARIES = (Corrupt,)
    bench("corrupt.nccl", "nccl", "all_reduce", "all_gather", "-e", "8", "-l", "corrupt", *small)
    (folder / "codes.json").write_text(json.dumps(codes))


if __name__ == "__main__":
    run(Path(sys.argv[1]))
