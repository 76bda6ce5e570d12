"""all_reduce against mpi4py and one MPI call, interleaved in one run.

    mpirun -n 2 python tests/perf/all_reduce.py [--repeats 30] [--sizes 8 65536 ...]

Per size: the median over repeats of the slowest rank's time per call, for hpcdist with the entry
check on and off and for mpi4py's ``Allreduce(IN_PLACE)`` of a like buffer - which from about 1 MiB
on is the time of the plain C call. The repeats of the three alternate, so that noise of the machine
hits all alike. Rank 0 prints.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch
from mpi4py import MPI

import hpcdist as dist

SIZES = [8, 1024, 64 << 10, 1 << 20, 25 << 20, 64 << 20]


def calls_for(size: int) -> int:
    """How many calls make a measurement of a few milliseconds."""
    return max(1, min(2000, (4 << 20) // max(size, 2048)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=30, help="measurements per size and library")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="bytes")
    args = parser.parse_args()

    dist.init_process_group()
    comm = MPI.COMM_WORLD
    native = dist.group.WORLD._comm
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks, {MPI.Get_library_version().splitlines()[0][:60]}")
        names = ("hpcdist on", "hpcdist off", "mpi4py", "off/mpi4py", "on-off")
        print(f"{'bytes':>10}" + "".join(f"{name:>12}" for name in names) + "   (us)")
    for size in args.sizes:
        tensor = torch.zeros(max(1, size // 4))
        array = torch.zeros(
            max(1, size // 4)
        ).numpy()  # the same allocator: NumPy's own uses huge pages
        n = calls_for(size)

        def ours(tensor=tensor, n=n) -> None:
            all_reduce = dist.all_reduce
            for _ in range(n):
                all_reduce(tensor)

        def theirs(array=array, n=n) -> None:
            call, place = comm.Allreduce, MPI.IN_PLACE
            for _ in range(n):
                call(place, array)

        times: dict[str, list[float]] = {"on": [], "off": [], "mpi4py": []}
        for repeat in range(args.repeats + 2):
            for name, call, check in (("on", ours, 1), ("off", ours, 0), ("mpi4py", theirs, 0)):
                comm.Barrier()
                native.check = check
                comm.Barrier()
                start = time.perf_counter()
                call()
                spent = comm.allreduce((time.perf_counter() - start) / n, MPI.MAX)
                if repeat >= 2:  # the first two warm up
                    times[name].append(spent * 1e6)
        native.check = 1
        on, off, other = (float(np.median(times[k])) for k in ("on", "off", "mpi4py"))
        if dist.get_rank() == 0:
            row = (on, off, other, off / other, on - off)
            print(f"{size:>10}" + "".join(f"{value:>12.2f}" for value in row), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
