"""Rows of run.py that need cores, and no GPU: every rank has a core of its own.

The MPI is the one that hpcdist is built with; for another one, run these rows again with a Python
whose hpcdist is built with it: ``-k cores``.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

from gpu_table import JobFailed, NotRehearsed, Row, adder, mpi_family, mpirun, rehearsing

ROWS: list[Row] = []
row = adder(ROWS)
#: What the collectives are compared with; the columns of the table.
LIBRARIES = ("hpcdist", "hpcdist-off", "c", "mpi4py", "gloo")


def cores() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0))


def bound(count: int, each: int, *command: str) -> tuple[str, str]:
    """Run ranks on cores of their own: the output, and what is to be said about the cores.

    Where MPI cannot bind them, as in some containers, they run unbound.
    """
    if count * each > cores():
        why = f"{count * each} cores are needed, {cores()} are there"
        raise NotRehearsed(why) if rehearsing() else RuntimeError(why)
    openmpi = mpi_family() == "Open MPI"
    place = ("--bind-to", "core", "--map-by", f"slot:PE={each}") if openmpi else (
        "-bind-to", f"core:{each}")  # fmt: skip
    free = ("--oversubscribe", "--bind-to", "none") if openmpi else ()
    env = {"OMP_NUM_THREADS": str(each), "CUDA_VISIBLE_DEVICES": ""}
    try:
        return mpirun(count, *command, options=place, plain=True, **env), "bound"
    except JobFailed as error:
        print(f"not bound: {error}", flush=True)
        return mpirun(count, *command, options=free, plain=True, **env), "not bound to their cores"


def measured(count: int, each: int, *command: str) -> tuple[dict, str]:
    """What a bench reports as JSON, and about the cores."""
    with tempfile.TemporaryDirectory(prefix="hpcdist-gpu.") as folder:
        file = Path(folder) / "found"
        bench = ("-m", "hpcdist", "bench", *command, "-q", "--format", "json", "-o", str(file))
        how = bound(count, each, *bench)[1]
        return json.loads(file.read_text()), how


def heading(found: dict, how: str) -> str:
    """Where it was measured."""
    facts = found["facts"]
    return f"{facts['processor']}, {facts['MPI']}, {facts['ranks']}, {how}"


def collectives(count: int) -> str:
    """A table of all collectives, in microseconds."""
    few = ("-n", "3", "-w", "1", "-e", "8") if rehearsing() else ("-n", "12", "-e", "16M")
    found, how = measured(count, 1, "all", "-b", "8", "-f", "128", *few)
    figures: dict[tuple[str, int], dict[str, float]] = {}
    wrong = 0
    for each in found["rows"]:
        at = each["operation"], each["size_bytes"]
        figures.setdefault(at, {})[each["library"]] = each["time_us"]
        wrong += each["wrong"] or 0
    assert not wrong, f"{wrong} wrong elements"
    lines = [f"{'us':24}{'bytes':>10}" + "".join(f"{name:>13}" for name in LIBRARIES)]
    for (operation, size), times in figures.items():
        shown = (f"{times[name]:13.2f}" if name in times else f"{'':13}" for name in LIBRARIES)
        lines.append(f"{operation:24}{size or 0:>10}" + "".join(shown))
    both = [t for t in figures.values() if "hpcdist" in t and "c" in t]
    ahead = sum(t["hpcdist"] <= t["c"] for t in both)
    first = f"{heading(found, how)}: hpcdist at most C's time in {ahead} of {len(both)}"
    return "\n".join([first, *lines, *found["notes"]])


@row("cores: all collectives, 2 ranks, a core each", seconds=25, worth=4, gpu=False)
def two() -> str:
    """Beside C, mpi4py and gloo."""
    return collectives(2)


@row("cores: all collectives, 4 ranks, a core each", seconds=30, worth=5, gpu=False)
def four() -> str:
    """Beside C, mpi4py and gloo."""
    return collectives(4)


@row("cores: all collectives, 8 ranks, a core each", seconds=40, worth=4, gpu=False)
def eight() -> str:
    """Beside C, mpi4py and gloo."""
    return collectives(8)


@row("cores: all collectives, 16 ranks, a core each", seconds=60, worth=3, gpu=False)
def sixteen() -> str:
    """Beside C, mpi4py and gloo."""
    return collectives(16)


@row("cores: DDP, 8 ranks, two cores each", seconds=50, worth=3, gpu=False)
def ddp() -> str:
    """Beside torch's DDP over gloo."""
    few = ("-m", "tiny", "-n", "2") if rehearsing() else ("-n", "7")
    count, each = (2, 1) if rehearsing() else (8, 2)
    found, how = measured(count, each, "ddp", "--threads", str(each), *few)
    lines = [heading(found, how)]
    for line in found["rows"]:
        lines.append(", ".join(f"{key} {_short(value)}" for key, value in line.items()))
    return "\n".join(lines)


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
