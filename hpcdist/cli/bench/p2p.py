"""Measure point to point between two ranks, beside other libraries in the same run.

Every second rank talks to the one after it: 0 with 1, 2 with 3, all pairs at once.

  latency     half the time of a message there and back (send, recv)
  bandwidth   windows of --window messages (isend, irecv), each window answered by one message

A row is the median over the rounds of the slowest pair. hpcdist checks no more here than a message
tells by itself: dtype and size.
"""

from __future__ import annotations

import argparse

from hpcdist.dtypes import DTYPES, lookup

from ..numbers import positive
from . import arguments, formats, plot
from .errors import BenchError
from .job import MpiJob
from .libraries import CLoop, Gloo, Hpcdist, Mpi4py
from .library import Library, close_libraries, collect_batches, open_libraries
from .measure import Batch, interleave
from .operations import fill_other, pattern_of

_LIBRARIES: tuple[type[Library], ...] = (Hpcdist, CLoop, Mpi4py, Gloo)
_KINDS = ("latency", "bandwidth")

COLUMNS = (
    formats.Column("size_bytes", "size", "B", 12),
    formats.Column("count", "count", "elements", 13),
    formats.Column("type", "type", "", 10),
    formats.Column("time_us", "time", "us", 11, ".2f"),
    formats.Column("bandwidth_MBps", "bandwidth", "MB/s", 12, ".2f"),
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
        "kinds",
        nargs="*",
        metavar="KIND",
        default=list(_KINDS),
        help=f"{' or '.join(_KINDS)} (both)",
    )
    arguments.add_sizes(parser)
    arguments.add_measure(parser)
    group = parser.add_argument_group("what exactly")
    group.add_argument(
        "-d",
        "--dtype",
        default="float32",
        choices=[dtype.name for dtype in DTYPES],
        metavar="DTYPE",
        help="of the elements (float32)",
    )
    group.add_argument(
        "--window", type=positive, default=64, metavar="N", help="messages at once (64)"
    )
    arguments.add_libraries(group, [library.name for library in _LIBRARIES])
    group.add_argument(
        "--no-check", action="store_true", help="do not compare what arrives with what was sent"
    )
    arguments.add_output(parser, ("nccl", "osu", "csv", "json"), plot=True)


def run(options: argparse.Namespace) -> int:
    """Measure and print; return 1 if something else arrived than was sent.

    Raises BenchError on all ranks if the arguments make no sense.
    """
    for kind in options.kinds:
        if kind not in _KINDS:
            raise BenchError(f"no kind {kind!r}; there are: {', '.join(_KINDS)}")
    sizes = arguments.sizes(options)
    with MpiJob(options.quiet) as job:
        if job.size < 2:
            raise BenchError(
                "point to point needs two ranks: mpirun -n 2 python -m hpcdist bench p2p"
            )
        plot.ready(job, options.plot)
        form = options.format
        tables = {
            kind: formats.Pivot("size_bytes", "library", value)
            for kind, value in zip(_KINDS, ("time_us", "bandwidth_MBps"), strict=True)
        }
        table = formats.Table(job, COLUMNS, form, options.output)
        table.begin(job.facts())
        libraries = open_libraries(job, table, _LIBRARIES, options.libraries)
        wrong = done = 0
        for kind in options.kinds:
            table.section(
                f"{kind}, {options.dtype}",
                tables[kind],
                [library.name for library in libraries],
            )
            left_out: set[str] = set()
            for size in sizes:
                job.progress(
                    done, len(sizes) * len(options.kinds), f"{kind}, {formats.short(size)}"
                )
                wrong += _row(job, table, libraries, kind, size, left_out, options)
                done += 1
        if wrong:
            table.note(f"{wrong} wrong elements")
        table.end()
        plot.draw(job, table, options.plot)
        close_libraries(libraries)
    return 1 if wrong else 0


def _row(
    job: MpiJob,
    table: formats.Table,
    libraries: list[Library],
    kind: str,
    size: int,
    left_out: set[str],
    options: argparse.Namespace,
) -> int:
    """One size with all libraries; returns how many elements were wrong."""
    import torch

    dtype = lookup(options.dtype)
    count = max(1, size // dtype.itemsize)
    send = pattern_of(job.rank, count, dtype)
    recv = torch.empty_like(send)
    sends, paired = job.rank % 2 == 0, job.rank ^ 1 < job.size
    peer = job.rank ^ 1

    def make(library: Library) -> Batch:
        if not paired:
            return lambda calls: None
        if kind == "latency":
            return library.ping_pong(send, recv, peer, sends)
        return library.stream(send if sends else recv, peer, sends, options.window)

    batches = collect_batches(job, table, libraries, make, left_out)
    if not batches:
        return 0
    receives = paired and (kind == "latency" or not sends)
    expected = pattern_of(peer, count, dtype)
    wrong: dict[str, int | None] = {name: None if options.no_check else 0 for name in batches}
    times = interleave(job, batches, options.rounds, options.warmup, options.calls)
    for name, batch in batches.items():
        if not options.no_check:
            fill_other(recv, expected)
            batch(1)
            bad = int((recv.view(torch.uint8) != expected.view(torch.uint8)).sum())
            wrong[name] = job.total(bad if receives else 0)
    messages = 2 if kind == "latency" else options.window
    for name, time in times.items():
        one = time.median / messages
        table.row(
            {
                "operation": kind,
                "size_bytes": count * dtype.itemsize,
                "count": count,
                "type": dtype.name,
                "time_us": one * 1e6,
                "bandwidth_MBps": count * dtype.itemsize / one / 1e6,
                "wrong": wrong[name],
                "spread": time.spread,
                "library": name,
                "min_us": time.least / messages * 1e6,
                "max_us": time.most / messages * 1e6,
                "calls": time.calls,
                "rounds": options.rounds,
            }
        )
    return sum(each or 0 for each in wrong.values())
