#!/usr/bin/env python
"""Run on one GPU all that needs one, and print a table for docs/gpu.md.

    python tests/gpu/run.py              everything
    python tests/gpu/run.py -k overlap   rows whose name has "overlap"
    python tests/gpu/run.py --list       the names of the rows
    python tests/gpu/run.py --stand-in   rehearse the rows where there is no GPU: see rehearsal.py

Needs a torch built with CUDA and its NCCL, hpcdist installed, and for the rows "over MPI" and
"examples" an mpirun (the variable MPIRUN, PATH, or beside Python). A row that cannot run has
failed. Exits with 1 if a row failed, and with 2 if there is no GPU, when nothing is run, or no row
of that name.
"""

from __future__ import annotations

import argparse
import re
import sys
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import gpu_rows_mpi  # noqa: E402
import gpu_rows_nccl  # noqa: E402
from gpu_table import NotRehearsed, Row  # noqa: E402

ROWS: list[Row] = [*gpu_rows_nccl.ROWS, *gpu_rows_mpi.ROWS]


def selected(pattern: str) -> list[Row]:
    """Rows in whose name this is found."""
    return [each for each in ROWS if re.search(pattern, each[0], re.IGNORECASE)]


def rehearse() -> None:
    """From here on the stand-ins are in the place of a GPU."""
    import rehearsal

    rehearsal.install()


def main() -> int:
    """Run the rows and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-k", default="", help="only rows in whose name this is found (a regex)")
    parser.add_argument("--list", action="store_true", help="only name the rows")
    parser.add_argument("--stand-in", action="store_true", help="rehearse without a GPU")
    options = parser.parse_args()
    rows = selected(options.k)
    if not rows:
        print(f"no row has {options.k!r} in its name; --list shows them")
        return 2
    if options.list:
        print(*(name for name, _ in rows), sep="\n")
        return 0
    if options.stand_in:
        rehearse()
        print("A REHEARSAL, without a GPU and without NCCL: the figures mean nothing.\n")
    try:
        import torch

        there = torch.cuda.is_available()
    except ImportError:
        there = False
    if not there:
        print("no GPU that torch can use: nothing was run")
        return 2
    failed = 0
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}\n\n| what | result |\n|---|---|"
    )
    for name, function in rows:
        try:
            said = function()
        except NotRehearsed as why:
            said = f"not rehearsed: {why}"
        except Exception as error:
            traceback.print_exc()
            said, failed = f"FAILED: {type(error).__name__}: {error}", failed + 1
        print(f"| {name} | {said} |", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
