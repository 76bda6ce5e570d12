"""Measure how much communication hides behind computation.

An asynchronous all_reduce runs beside matrix products on the calling thread. In each round:

  comm     the all_reduce alone, waited for at once
  compute  the matrix products alone; as many as take --ratio of comm's time
  both     the all_reduce started, the products, then the wait
  hidden   of the shorter of comm and compute, the share that both saves: 100 % is perfect,
           0 % is one after the other
  /max     both over the longer of comm and compute: 1.00 is perfect
  handoff  how long the call that starts the all_reduce keeps the caller

Every time is the median over the rounds of the slowest rank's. hpcdist moves data on a thread of
its own; mpi4py's Iallreduce shows what the MPI library does by itself; gloo has threads too.

Over shared memory there is little to hide: communication is copying, which takes a core itself.
tests/perf/netns.py of the source tree runs this over a slow link on one machine.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from hpcdist.dtypes import DTYPES, lookup

from ..numbers import positive
from . import arguments, formats
from .errors import BenchError, Unsupported
from .job import MpiJob
from .libraries import Gloo, Hpcdist, Mpi4py
from .library import Library, close_libraries, open_libraries
from .measure import interleave
from .operations import OPERATIONS, Case

_LIBRARIES: tuple[type[Library], ...] = (Hpcdist, Mpi4py, Gloo)

COLUMNS = (
    formats.Column("size_bytes", "size", "B", 12),
    formats.Column("comm_ms", "comm", "ms", 10, ".2f"),
    formats.Column("compute_ms", "compute", "ms", 10, ".2f"),
    formats.Column("both_ms", "both", "ms", 10, ".2f"),
    formats.Column("hidden", "hidden", "", 8, ".0%"),
    formats.Column("over_max", "/max", "", 7, ".2f"),
    formats.Column("handoff_us", "handoff", "us", 9, ".1f"),
    formats.Column("spread", "spread", "", 8, ".0%"),
    formats.Column("wrong", "#wrong", "", 8),
    formats.Column("library", "library", "", 12),
    formats.Column("type"),
    formats.Column("products"),
    formats.Column("rounds"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument(
        "-s",
        "--size",
        type=arguments.size,
        nargs="+",
        default=[25 << 20],
        metavar="B",
        help="bytes of the all_reduce (25M)",
    )
    group = parser.add_argument_group("computation")
    group.add_argument(
        "--ratio",
        type=float,
        default=0.95,
        metavar="R",
        help="time of the products over that of hpcdist's all_reduce (0.95)",
    )
    group.add_argument(
        "--matrix", type=positive, default=512, metavar="N", help="rows and columns (512)"
    )
    group.add_argument("--threads", type=positive, default=1, metavar="N", help="of torch (1)")
    arguments.add_measure(parser, rounds=11, calls=False)
    group = parser.add_argument_group("what exactly")
    names = [library.name for library in _LIBRARIES]
    group.add_argument(
        "-d",
        "--dtype",
        default="float32",
        choices=[dtype.name for dtype in DTYPES if "SUM" in dtype.ops],
        metavar="DTYPE",
        help="of the all_reduce (float32)",
    )
    arguments.add_libraries(group, names)
    arguments.add_output(parser)


def run(options: argparse.Namespace) -> int:
    """Measure and print; return 1 if a result was wrong.

    Raises BenchError on all ranks if the arguments make no sense.
    """
    if not options.ratio > 0:
        raise BenchError(f"--ratio {options.ratio:g} must be positive")
    wrong = 0
    with MpiJob(options.quiet) as job:
        table = formats.Table(job, COLUMNS, options.format, options.output)
        table.begin(job.facts())
        libraries = open_libraries(job, table, _LIBRARIES, options.libraries)
        import torch

        torch.set_num_threads(options.threads)
        table.section(
            f"all_reduce of {options.dtype} beside products of "
            f"{options.matrix} x {options.matrix} float32 matrices on "
            f"{options.threads} thread{'s' if options.threads > 1 else ''}"
        )
        for index, size in enumerate(options.size):
            job.progress(index, len(options.size), f"overlap, {formats.short(size)}")
            wrong += _rows(job, table, libraries, size, options)
        if wrong:
            table.note(f"{wrong} wrong elements")
        table.end()
        close_libraries(libraries)
    return 1 if wrong else 0


def _rows(
    job: MpiJob,
    table: formats.Table,
    libraries: list[Library],
    size: int,
    options: argparse.Namespace,
) -> int:
    """One size with all libraries; returns how many elements were wrong."""
    case = Case(OPERATIONS["all_reduce"], size, lookup(options.dtype), "SUM", 0, job.rank, job.size)
    starts: dict[str, Callable[[], Callable[[], Any]]] = {}
    for library in libraries:
        try:
            starts[library.name] = library.start(case)
        except Unsupported as error:
            table.note(f"without {library.name}: {error}")
    if not starts:
        return 0
    product = _product(options.matrix)
    alone = {name: _alone(start) for name, start in starts.items()}
    first = next(iter(starts))
    products = _enough(job, alone[first], product, options.ratio)
    handoffs = {name: _Handoff() for name in starts}
    contenders: dict[str, Callable[[int], None]] = {"compute": lambda calls: product(products)}
    for name, start in starts.items():
        contenders[f"comm {name}"] = alone[name]
        contenders[f"both {name}"] = _both(start, product, products, handoffs[name])
    case.rest()
    times = interleave(job, contenders, options.rounds, options.warmup, calls=1)
    compute = times["compute"].median
    total = 0
    for name in starts:
        comm, both = times[f"comm {name}"].median, times[f"both {name}"].median
        case.fill()
        job.barrier()
        contenders[f"both {name}"](1)
        wrong = job.total(case.wrong())
        total += wrong
        table.row(
            {
                "size_bytes": case.size,
                "comm_ms": comm * 1e3,
                "compute_ms": compute * 1e3,
                "both_ms": both * 1e3,
                "hidden": (comm + compute - both) / min(comm, compute),
                "over_max": both / max(comm, compute),
                "handoff_us": float(np.max(job.worst([handoffs[name].median]))) * 1e6,
                "spread": times[f"both {name}"].spread,
                "wrong": wrong,
                "library": name,
                "type": options.dtype,
                "products": products,
                "rounds": options.rounds,
            }
        )
    return total


class _Handoff:
    """Times of the starting call."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    @property
    def median(self) -> float:
        """float: the middle, in seconds."""
        return float(np.median(self.seconds))


def _product(n: int) -> Callable[[int], None]:
    """A function that multiplies matrices a number of times."""
    import torch

    left, right, out = torch.rand(n, n), torch.rand(n, n), torch.empty(n, n)

    def run(times: int) -> None:
        for _ in range(times):
            torch.mm(left, right, out=out)

    return run


def _alone(start: Callable[[], Callable[[], Any]]) -> Callable[[int], None]:
    def run(calls: int) -> None:
        for _ in range(calls):
            start()()

    return run


def _both(
    start: Callable[[], Callable[[], Any]],
    product: Callable[[int], None],
    products: int,
    handoff: _Handoff,
) -> Callable[[int], None]:
    clock = time.perf_counter

    def run(calls: int) -> None:
        for _ in range(calls):
            began = clock()
            wait = start()
            handoff.seconds.append(clock() - began)
            product(products)
            wait()

    return run


def _enough(
    job: MpiJob, comm: Callable[[int], None], product: Callable[[int], None], ratio: float
) -> int:
    """How many products take `ratio` of the time of the communication; the same on all ranks."""
    product(2)
    count = 4
    for _ in range(2):  # a few of them first, then as many: a long run is not its parts
        batch = partial(_several, product, count)
        times = interleave(job, {"comm": comm, "products": batch}, rounds=5, warmup=1, calls=1)
        count = max(1, round(count * ratio * times["comm"].median / times["products"].median))
    return count


def _several(product: Callable[[int], None], count: int, calls: int) -> None:
    product(count * calls)
