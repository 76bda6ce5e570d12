"""Windows between nodes beside MPI's own windows: what put, get and accumulate take.

    HPCDIST_NODES=2 mpirun -n 2 --bind-to none python tests/perf/windows.py [--computes]

Rank 0 asks rank 1, which waits in a receive, or with `--computes` multiplies matrices. hpcdist and
mpi4py (a lock of its window that lasts, and a flush after each call) have their turns in each
round. To mpi4py both ranks are on one node. Medians and tenth percentiles over all calls, in
microseconds; "puts" are IN_FLIGHT at once, and a flush after the last, one of them counted.
`OMPI_MCA_osc=^ucx` silences a complaint of Open MPI.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import torch
from mpi4py import MPI

import hpcdist as dist

SIZES = (8, 64 << 10, 1 << 20, 16 << 20)  # bytes of float32
ROUNDS = 5
#: Seconds for the calls of a turn.
TURN = 0.3
#: Puts that have begun before the first one is waited for.
IN_FLIGHT = 64
Calls = dict[str, Callable[[], object]]


def calls_of(window: dist.Window, theirs: MPI.Win, n: int) -> dict[str, Calls]:
    """What rank 0 measures, by library and operation."""
    given, taken = torch.ones(n), torch.empty(n)
    sent, got = given.numpy(), taken.numpy()

    def flushed(begin: Callable[[], object]) -> Callable[[], object]:
        return lambda: (begin(), theirs.Flush(1))

    def puts() -> None:
        for work in [window.put(given, 1, async_op=True) for _ in range(IN_FLIGHT)]:
            work.wait()

    def their_puts() -> None:
        for _ in range(IN_FLIGHT):
            theirs.Put(sent, 1)
        theirs.Flush(1)

    return {
        "hpcdist": {
            "put": lambda: window.put(given, 1),
            "get": lambda: window.get(taken, 1),
            "accumulate": lambda: window.accumulate(given, 1),
            "puts": puts,
        },
        "mpi4py": {
            "put": flushed(lambda: theirs.Put(sent, 1)),
            "get": flushed(lambda: theirs.Get(got, 1)),
            "accumulate": flushed(lambda: theirs.Accumulate(sent, 1)),
            "puts": their_puts,
        },
    }


def times_of(call: Callable[[], object]) -> list[float]:
    """Microseconds of calls, one after the other."""
    call()
    found, until = [], time.perf_counter() + TURN
    while not found or time.perf_counter() < until:
        began = time.perf_counter()
        call()
        found.append((time.perf_counter() - began) * 1e6)
    return found


def ask(by_library: dict[str, Calls], nbytes: int) -> None:
    """Measure one size, and print a line per operation."""
    found: dict[tuple[str, str], list[float]] = {}
    for _ in range(ROUNDS):
        for library, calls in by_library.items():
            for name, call in calls.items():
                found.setdefault((name, library), []).extend(times_of(call))
    for name in by_library["hpcdist"]:
        parts = []
        for library in by_library:
            calls = IN_FLIGHT if name == "puts" else 1
            times = sorted(each / calls for each in found[name, library])
            low = times[len(times) // 10]
            parts.append(f"{library} {statistics.median(times):9.1f} ({low:.1f})")
        print(f"{nbytes:>9} bytes, {name:<10}  {'   '.join(parts)}", flush=True)


def answer(computes: bool) -> None:
    """Be rank 1 until rank 0 sends a message."""
    over = torch.empty(1)
    if not computes:
        dist.recv(over, 0)
        return
    work, matrix = dist.irecv(over, 0), torch.ones(400, 400)
    while not work.is_completed():
        matrix @ matrix  # noqa: B018 - only its time matters
    work.wait()


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="tests/perf/windows.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--computes", action="store_true", help="rank 1 multiplies matrices")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group()
    if dist.get_world_size() != 2:
        sys.exit("tests/perf/windows.py: it takes two ranks")
    rank = dist.get_rank()
    if rank == 0:
        print(f"the median (the tenth percentile), us; {MPI.Get_library_version().split(',')[0]}")
    for nbytes in SIZES:
        n = nbytes // 4
        window = dist.group.WORLD.new_window(torch.zeros(n))
        theirs = MPI.Win.Create(torch.zeros(n).numpy(), 4, comm=MPI.COMM_WORLD)
        theirs.Lock_all()
        dist.barrier()
        if rank == 0:
            ask(calls_of(window, theirs, n), nbytes)
            dist.send(torch.ones(1), 1)
        else:
            answer(options.computes)
        dist.barrier()
        theirs.Unlock_all()
        theirs.Free()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
