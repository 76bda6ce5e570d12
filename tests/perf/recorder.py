#!/usr/bin/env python
"""What the flight recorder costs: all_reduce of 8 B with and without it, in one run.

    mpirun -n 2 python tests/perf/recorder.py [--rounds 400] [--calls 2000]

The recorder's ring is taken away and given back in turn, which switches it off and on at the next
call. Prints the quartiles of both over the rounds, in nanoseconds per call, and the median of the
differences of neighbouring rounds.
"""

from __future__ import annotations

import argparse
import ctypes
import time

import numpy as np

import hpcdist as dist
from hpcdist import _engine


def ring() -> ctypes.c_void_p:
    """The pointer to the ring: the first field of hd_rec, which is found by what it points to.

    The symbol is local to the module, so its place comes from the module's own symbol table.
    """
    import subprocess

    listed = subprocess.run(["nm", _engine.__file__], capture_output=True, text=True, check=True)
    (offset,) = (line.split()[0] for line in listed.stdout.splitlines() if line.endswith(" hd_rec"))
    with open("/proc/self/maps") as maps:
        base = next(line.split("-")[0] for line in maps if _engine.__file__ in line)
    return ctypes.c_void_p.from_address(int(base, 16) + int(offset, 16))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--calls", type=int, default=2000)
    options = parser.parse_args()
    dist.init_process_group()
    data = np.zeros(1)
    dist.all_reduce(data)
    here = ring()
    whole, found = here.value, {True: [], False: []}
    assert whole, "the recorder is off"
    for turn in range(2 * options.rounds):
        on = turn % 2 == 0
        dist.barrier()
        here.value = whole if on else None
        for _ in range(50):
            dist.all_reduce(data)
        began = time.perf_counter_ns()
        for _ in range(options.calls):
            dist.all_reduce(data)
        found[on].append((time.perf_counter_ns() - began) / options.calls)
    here.value = whole
    if dist.get_rank() == 0:
        for on, name in ((True, "with"), (False, "without")):
            low, middle, high = np.percentile(found[on], (25, 50, 75))
            print(f"{name:>8}: {low:.0f} {middle:.0f} {high:.0f} ns")
        differences = np.subtract(found[True], found[False])
        least = min(found[True]) - min(found[False])
        print(f"costs {np.median(differences):.0f} ns (of the fastest rounds: {least:.0f} ns)")


if __name__ == "__main__":
    main()
