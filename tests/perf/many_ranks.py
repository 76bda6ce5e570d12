#!/usr/bin/env python
"""Many ranks on one machine, without torch: start, groups, one all_reduce, end. Not a test.

    python tests/perf/many_ranks.py             64 ranks, then 128
    python tests/perf/many_ranks.py 128 --limit 300

Runs the mpirun that is first on PATH. Prints what the slowest rank took for each part, and what the
largest has at the end: memory, threads and open files. The memory has no bound here; the exit
status is 1 if a job fails or does not end in time, or a sum is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def memory() -> dict[str, float]:
    """Return this process's memory in MiB: resident, and its own part of it."""
    kib: dict[str, int] = {}
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]:
        name, value = line.split(":")
        kib[name] = int(value.split()[0])
    own = kib["Private_Clean"] + kib["Private_Dirty"]
    return {"private": own / 1024, "resident": kib["Rss"] / 1024}


def rank_main() -> None:
    """One rank of the job; the first one prints a line of JSON."""
    began = time.monotonic()
    import numpy as np

    import hpcdist as dist
    from hpcdist import _engine

    took: dict[str, float] = {}

    def part(name: str, call: Callable[[], Any]) -> Any:
        nonlocal began
        result = call()
        now = time.monotonic()
        took[name], began = now - began, now
        return result

    part("import", lambda: None)
    part("MPI_Init", _engine.init_mpi)
    part("start", dist.init_process_group)
    rank, size = dist.get_rank(), dist.get_world_size()
    ones = np.ones(1 << 14, dtype=np.float32)
    part("all_reduce", lambda: dist.all_reduce(ones))
    half = range(size // 2) if rank < size // 2 else range(size // 2, size)
    group = part("new_group", lambda: dist.new_group(list(half)))
    part("half", lambda: dist.all_reduce(ones, group=group))
    right = bool((ones == size * len(half)).all())
    about = {
        "right": right,
        "without torch": "torch" not in sys.modules,
        "threads": len(os.listdir("/proc/self/task")),
        "files": len(os.listdir("/proc/self/fd")) - 1,
        **memory(),
        **took,
    }
    everything: list[Any] = [None] * size
    dist.all_gather_object(everything, about)
    if rank == 0:
        line = {key: max(one[key] for one in everything) for key in about}
        for key in ("right", "without torch"):
            line[key] = all(one[key] for one in everything)
        print(json.dumps(line), flush=True)
    dist.destroy_process_group()


def launcher() -> list[str]:
    """Return the mpirun on PATH, with what it needs for more ranks than cores."""
    told = subprocess.run(["mpirun", "--version"], capture_output=True, text=True).stdout
    more = ["--oversubscribe", "--bind-to", "none"] if "Open MPI" in told else []
    return ["mpirun", *more]


def run_job(ranks: int, limit: float) -> bool:
    """Run a job of so many ranks and print its row; returns whether all went well."""
    command = ["timeout", "--kill-after=10", str(limit), *launcher(), "-n", str(ranks)]
    began = time.monotonic()
    done = subprocess.run(
        [*command, sys.executable, __file__, "--rank"], stdout=subprocess.PIPE, text=True
    )
    seconds = time.monotonic() - began
    rows = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not rows:
        print(f"{ranks} ranks: exit status {done.returncode} after {seconds:.1f} s\n{done.stdout}")
        return False
    row = json.loads(rows[-1])
    parts = ("import", "MPI_Init", "start", "all_reduce", "new_group", "half")
    print(f"{ranks} ranks: {seconds:.1f} s in all")
    print("  seconds: " + ", ".join(f"{name} {row[name]:.2f}" for name in parts))
    print(
        f"  per rank: {row['private']:.1f} MiB private, {row['resident']:.1f} MiB resident, "
        f"{row['threads']} threads, {row['files']} files"
    )
    if not row["right"] or not row["without torch"]:
        print("  NO: a sum is wrong, or torch was imported")
    return row["right"] and row["without torch"]


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="tests/perf/many_ranks.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("ranks", type=int, nargs="*", default=[64, 128])
    parser.add_argument("--limit", type=float, default=300, metavar="S", help="seconds for a job")
    options = parser.parse_args()
    return 0 if all([run_job(ranks, options.limit) for ranks in options.ranks]) else 1


if __name__ == "__main__":
    if sys.argv[1:] == ["--rank"]:
        rank_main()
    else:
        sys.exit(main())
