"""``python -m hpcdist bench``: how fast communication is here, and beside other libraries.

Each bench is a module of this folder. ``add_arguments(parser)`` adds its options; ``run(options)``
measures, prints, and returns the exit status. All ranks call both, and a BenchError is raised on
all of them. The module's docstring is its help. What benches share: `arguments` (options and
sizes), `job` (the ranks, what rank 0 prints), `measure` (interleaved medians), `formats` (tables),
`plot`, and the compared `libraries`.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time
from collections.abc import Sequence

from hpcdist import launchers
from hpcdist.groups import state as group

from .errors import BenchError

__all__ = ["BENCHES", "DEFAULT", "main"]

#: Seconds by which the others leave after the rank that speaks, where there is no barrier yet: all
#: found the same fault, and a launcher ends the job at the first that leaves.
_LATER = 2

#: The bench that runs when none is named.
DEFAULT = "collectives"

#: Bench -> what it measures, in a line. The module of the same name in this folder does it.
BENCHES: dict[str, str] = {
    "collectives": "time and bandwidth of collectives, beside other libraries (the default)",
    "p2p": "latency and bandwidth between two ranks, beside other libraries",
    "store": "latency of the key-value stores, beside torch's",
    "overlap": "how much of an all_reduce hides behind computation",
    "ddp": "a training step of DistributedDataParallel, beside torch's over gloo",
    "torch": "stock torch over hpcdist: its DDP and FSDP2 steps, beside gloo",
}


def main(arguments: Sequence[str]) -> int:
    """Run one bench.

    Every rank calls it, with the same arguments.

    Parameters
    ----------
    arguments : sequence of str
        The bench's name, which may be left out, and its arguments.

    Returns
    -------
    int
        The exit status: 0 if all is well, 1 if a result was wrong, 2 if the arguments make no sense
        or something that the bench needs is missing.
    """
    words = list(arguments)
    name = words.pop(0) if words and words[0] in BENCHES else DEFAULT
    module = importlib.import_module(f"{__name__}.{name}")
    parser = argparse.ArgumentParser(
        prog="python -m hpcdist bench" + ("" if name == DEFAULT else f" {name}"),
        description=module.__doc__,
        epilog=_epilog(name),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    module.add_arguments(parser)
    first = _is_first()
    # a job script may export it; torch reads it at its import, and "gloo" would be hpcdist itself
    if os.environ.pop("HPCDIST_TAKE_OVER", "") and first:
        print("hpcdist bench: HPCDIST_TAKE_OVER is not used here", file=sys.stderr, flush=True)
    try:
        with _only(first):
            options = parser.parse_args(words)
    except SystemExit as ended:
        if not first and ended.code:
            time.sleep(_LATER)
        raise
    try:
        return module.run(options)
    except BenchError as error:
        if group.is_initialized():
            first = group.get_rank() == 0
        if first:
            print(f"hpcdist bench: error: {error}", file=sys.stderr, flush=True)
        if group.is_initialized():
            group.world.comm.barrier()
        elif not first:
            time.sleep(_LATER)
        return 2


def _epilog(name: str) -> str:
    """The other benches, and how to start one."""
    lines = [f"  {each:<12} {line}" for each, line in BENCHES.items()]
    chosen = "" if name == DEFAULT else f" {name}"
    return (
        "benches:\n"
        + "\n".join(lines)
        + "\n  (python -m hpcdist bench BENCH --help tells more)\n\n"
        + f"start it on two ranks:\n  mpirun -n 2 python -m hpcdist bench{chosen} ..."
    )


def _is_first() -> bool:
    """Whether this process speaks for the job, as far as that is known before MPI starts."""
    found = launchers.detect()
    return found is None or not found.rank


class _only:
    """Silence standard output and error on all ranks but one."""

    def __init__(self, first: bool) -> None:
        self.first = first

    def __enter__(self) -> None:
        self.kept = sys.stdout, sys.stderr
        if not self.first:
            self.null = open(os.devnull, "w")
            sys.stdout = sys.stderr = self.null

    def __exit__(self, *error: object) -> None:
        sys.stdout, sys.stderr = self.kept
        if not self.first:
            self.null.close()
