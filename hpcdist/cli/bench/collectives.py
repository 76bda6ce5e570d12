"""Measure collectives, beside other libraries in the same run.

For each operation, dtype and size every library has its turn in each round, on the same memory. A
row is the median over the rounds of the slowest rank's time for one call. Before and after that the
results are compared with what they must be (#wrong). Libraries that are missing, or do not offer an
operation, are left out, with a line that says so.

  hpcdist      as it comes, with the entry check
  hpcdist-off  without the entry check (HPCDIST_CHECK=off)
  c            a loop in C over the same MPI call: what the library takes by itself
  floor        loops in C that move the bytes which the operation cannot avoid, each rank its share
               in tensors of its own: there is no result to compare
  mpi4py       the same MPI call from mpi4py, on NumPy arrays
  gloo         torch.distributed with its gloo backend, in the same processes

and with --libraries

  hpcdist-fast   with HPCDIST_CHECK=fast, which is another check between nodes
  hpcdist-async  with async_op=True, waited for at once: what is above hpcdist is the way to the
                 thread of the group's lane and back
  c-async        a loop in C over the nonblocking MPI call, waited for at once: the entry check
                 between nodes takes two of them
"""

from __future__ import annotations

import argparse

from hpcdist.dtypes import DTYPES, lookup

from ..numbers import natural
from . import arguments, formats, plot
from .busy import busy
from .errors import BenchError
from .job import MpiJob
from .libraries import ASKED_FOR, LIBRARIES
from .library import Library, close_libraries, collect_batches, open_libraries
from .measure import Batch, interleave
from .operations import OPERATIONS, Case, refuse

_REDOPS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")

_PIVOT = formats.Pivot("size_bytes", "library", "time_us")

COLUMNS = (
    formats.Column("size_bytes", "size", "B", 12),
    formats.Column("count", "count", "elements", 13),
    formats.Column("type", "type", "", 10),
    formats.Column("redop", "redop", "", 9),
    formats.Column("root", "root", "", 6),
    formats.Column("time_us", "time", "us", 11, ".2f"),
    formats.Column("algbw_GBps", "algbw", "GB/s", 8, ".2f"),
    formats.Column("busbw_GBps", "busbw", "GB/s", 8, ".2f"),
    formats.Column("wrong", "#wrong", "", 8),
    formats.Column("spread", "spread", "", 8, ".0%"),
    formats.Column("library", "library", "", 14),
    formats.Column("operation"),
    formats.Column("min_us"),
    formats.Column("max_us"),
    formats.Column("calls"),
    formats.Column("rounds"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument(
        "operations",
        nargs="*",
        metavar="OPERATION",
        default=["all_reduce"],
        help=f"what to measure (all_reduce), or all: {', '.join(OPERATIONS)}",
    )
    arguments.add_sizes(parser)
    arguments.add_measure(parser)
    group = parser.add_argument_group("what exactly")
    group.add_argument(
        "-d",
        "--dtype",
        nargs="+",
        default=["float32"],
        choices=[dtype.name for dtype in DTYPES],
        metavar="DTYPE",
        help="of the elements (float32)",
    )
    group.add_argument(
        "-O", "--redop", nargs="+", default=["SUM"], type=str.upper, choices=_REDOPS, metavar="OP",
        help="how reductions combine (SUM)",
    )  # fmt: skip
    group.add_argument("-r", "--root", type=int, default=0, metavar="RANK", help="(0)")
    names = [library.name for library in LIBRARIES if library not in ASKED_FOR]
    arguments.add_libraries(group, names, asked_for=[library.name for library in ASKED_FOR])
    group.add_argument(
        "--busy",
        type=natural,
        default=0,
        metavar="N",
        help="busy processes beside the ranks, on the node of rank 0 (0)",
    )
    group.add_argument(
        "--no-check", action="store_true", help="do not compare the results with what they must be"
    )
    arguments.add_output(parser, ("nccl", "osu", "csv", "json"), plot=True)


def run(options: argparse.Namespace) -> int:
    """Measure and print; return 1 if a result was wrong.

    Raises BenchError on all ranks if the arguments make no sense.
    """
    names = list(OPERATIONS) if options.operations == ["all"] else options.operations
    for name in names:
        if name not in OPERATIONS:
            raise BenchError(f"no operation {name!r}; there are: {', '.join(OPERATIONS)}, all")
    sizes = arguments.sizes(options)
    with MpiJob(options.quiet) as job:
        if not 0 <= options.root < job.size:
            raise BenchError(f"--root {options.root} is not one of the {job.size} ranks")
        plot.ready(job, options.plot)
        table = formats.Table(job, COLUMNS, options.format, options.output)
        table.begin(job.facts())
        if job.size == 1:
            table.note(
                "one rank: nothing is sent. Start it with mpirun -n 2 python -m hpcdist bench ..."
            )
        libraries = open_libraries(job, table, LIBRARIES, options.libraries)
        with busy(options.busy if job.first else 0):
            wrong = _measure(job, table, libraries, names, sizes, options)
        if wrong:
            table.note(f"{wrong} wrong elements")
        table.end()
        plot.draw(job, table, options.plot)
        close_libraries(libraries)
    return 1 if wrong else 0


def _measure(
    job: MpiJob,
    table: formats.Table,
    libraries: list[Library],
    names: list[str],
    sizes: list[int],
    options: argparse.Namespace,
) -> int:
    """All rows; returns how many elements were wrong."""
    plan = [
        (OPERATIONS[name], dtype, redop)
        for name in names
        for dtype in options.dtype
        for redop in (options.redop if OPERATIONS[name].reduces else ["none"])
    ]
    steps = sum(len(sizes) if operation.send else 1 for operation, _, _ in plan)
    done = wrong = 0
    for operation, dtype, redop in plan:
        title = operation.name
        if operation.send:
            title += f", {dtype}" + (f", {redop}" if operation.reduces else "")
        table.section(title, _PIVOT, [library.name for library in libraries])
        left_out: set[str] = set()
        for size in sizes if operation.send else [0]:
            job.progress(done, steps, f"{title}, {formats.short(size)}")
            case = Case(operation, size, lookup(dtype), redop, options.root, job.rank, job.size)
            wrong += _row(job, table, libraries, case, left_out, options)
            done += 1
    return wrong


def _row(
    job: MpiJob,
    table: formats.Table,
    libraries: list[Library],
    case: Case,
    left_out: set[str],
    options: argparse.Namespace,
) -> int:
    """One case with all libraries; returns how many elements were wrong."""

    def make(library: Library) -> Batch:
        refuse(case)
        return library.batch(case)

    batches = collect_batches(job, table, libraries, make, left_out)
    if not batches:
        return 0
    compared = {library.name for library in libraries if library.moves and not options.no_check}
    wrong = {name: 0 if name in compared else None for name in batches}
    _verify(job, case, batches, wrong)
    case.rest()
    times = interleave(job, batches, options.rounds, options.warmup, options.calls)
    _verify(job, case, batches, wrong)
    for name, time in times.items():
        algbw = case.size / time.median / 1e9
        table.row(
            {
                "operation": case.operation.name,
                "size_bytes": case.size,
                "count": case.count,
                "type": case.dtype.name if case.operation.send else "none",
                "redop": case.redop.lower(),
                "root": case.root if case.operation.rooted else -1,
                "time_us": time.median * 1e6,
                "algbw_GBps": algbw,
                "busbw_GBps": algbw * case.operation.bus(job.size),
                "wrong": wrong[name],
                "spread": time.spread,
                "library": name,
                "min_us": time.least * 1e6,
                "max_us": time.most * 1e6,
                "calls": time.calls,
                "rounds": options.rounds,
            }
        )
    return sum(each or 0 for each in wrong.values())


def _verify(
    job: MpiJob, case: Case, batches: dict[str, Batch], wrong: dict[str, int | None]
) -> None:
    """Let each library do it once on fresh data, and add up what is wrong on all ranks."""
    for name, batch in batches.items():
        before = wrong[name]
        if before is not None:
            case.fill()
            job.barrier()
            batch(1)
            wrong[name] = before + job.total(case.wrong())
