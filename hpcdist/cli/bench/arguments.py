"""Options that benches share, and what their texts mean."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from ..numbers import natural, positive
from .errors import BenchError

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


def size(text: str) -> int:
    """Bytes from a text such as ``8``, ``64K`` or ``1.5M``; the units are powers of 1024.

    K, M and G may have B or iB after them. ArgumentTypeError if the text is no such number.
    """
    word = text.strip().lower()
    for ending in ("ib", "b"):
        if word.endswith(ending):
            word = word.removesuffix(ending)
            break
    unit = word[-1:] if word[-1:] in ("k", "m", "g") else ""
    try:
        number = float(word.removesuffix(unit)) * _UNITS[unit]
        if number < 0 or number != int(number):
            raise ValueError
    except (ValueError, OverflowError):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no whole number of bytes, such as 8, 64K or 1.5M"
        ) from None
    return int(number)


def add_sizes(parser: argparse.ArgumentParser, begin: str = "8", end: str = "64M") -> None:
    """Add ``-b -e -f -i --sizes``: which sizes to measure."""
    group = parser.add_argument_group("sizes, in bytes (K, M, G: powers of 1024)")
    group.add_argument(
        "-b", "--begin", type=size, default=begin, metavar="B", help=f"smallest ({begin})"
    )
    group.add_argument("-e", "--end", type=size, default=end, metavar="B", help=f"largest ({end})")
    group.add_argument(
        "-f", "--factor", type=float, default=4, metavar="F", help="from each to the next (4)"
    )
    group.add_argument(
        "-i", "--step", type=size, metavar="B", help="add this to each instead of multiplying"
    )
    group.add_argument(
        "--sizes", nargs="+", type=size, metavar="B", help="these, instead of all of the above"
    )


def sizes(options: argparse.Namespace) -> list[int]:
    """The sizes that ``-b -e -f -i`` or ``--sizes`` ask for, in bytes, growing.

    Every rank finds the same fault, if there is one, and raises BenchError.
    """
    if options.sizes:
        return sorted(set(options.sizes))
    begin, end, factor, step = options.begin, options.end, options.factor, options.step
    if begin > end:
        raise BenchError(f"-b {begin} is larger than -e {end}")
    if step is None and not factor > 1:
        raise BenchError(f"-f {factor:g} must be larger than 1")
    if step is not None and step < 1:
        raise BenchError("-i must be at least 1")
    found, now = [], begin
    while now <= end:
        found.append(now)
        # a factor may be infinite
        now = now + step if step is not None else max(now + 1, int(min(end + 1, now * factor)))
    return found


def add_measure(
    parser: argparse.ArgumentParser, rounds: int = 20, warmup: int = 2, calls: bool = True
) -> None:
    """Add ``-n -w -c``: how often to measure; without `calls` no ``-c``."""
    group = parser.add_argument_group("measuring")
    group.add_argument(
        "-n",
        "--rounds",
        type=positive,
        default=rounds,
        metavar="N",
        help=f"measurements of each row; their median is printed ({rounds})",
    )
    group.add_argument(
        "-w",
        "--warmup",
        type=natural,
        default=warmup,
        metavar="N",
        help=f"measurements before those, thrown away ({warmup})",
    )
    if calls:
        group.add_argument(
            "-c",
            "--calls",
            type=positive,
            metavar="N",
            help="calls in one measurement (as many as take about 2 ms)",
        )


def add_models(parser: argparse.ArgumentParser) -> None:
    """Add ``-m --threads``: which modules to train, and on how many threads."""
    names = ["mlp", "cnn", "transformer", "tiny"]  # what ddp_models has, which imports torch
    parser.add_argument(
        "-m",
        "--model",
        nargs="+",
        default=names,
        choices=names,
        metavar="MODEL",
        help="mlp, cnn, transformer or tiny (all)",
    )
    parser.add_argument("--threads", type=positive, default=1, metavar="N", help="of torch (1)")


def add_libraries(
    group: argparse._ArgumentGroup, names: Sequence[str], asked_for: Sequence[str] = ()
) -> None:
    """Add ``-l``: what to compare by default, and what else there is."""
    all_names = [*names, *asked_for]
    group.add_argument(
        "-l",
        "--libraries",
        nargs="+",
        choices=all_names,
        default=list(names),
        metavar="LIBRARY",
        help=f"what to compare: {', '.join(all_names)} "
        f"(all{''.join(f' but {name}' for name in asked_for)})",
    )


def add_output(
    parser: argparse.ArgumentParser,
    formats: Sequence[str] = ("nccl", "csv", "json"),
    plot: bool = False,
) -> None:
    """Add ``--format -o -q --plot``: how the table looks, and where it goes.

    The first format is the default.
    """
    group = parser.add_argument_group("output, by rank 0")
    group.add_argument(
        "--format", choices=formats, default=formats[0], help=f"of the table ({formats[0]})"
    )
    group.add_argument("-o", "--output", metavar="FILE", help="write the table there")
    group.add_argument("-q", "--quiet", action="store_true", help="no progress on standard error")
    if plot:
        group.add_argument(
            "--plot",
            metavar="FILE",
            help="draw time and bandwidth over size, one line a library (needs matplotlib)",
        )
