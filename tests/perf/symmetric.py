"""Symmetric tensors beside others, and the floor: a copy of as many bytes on all ranks at once.

    mpirun -n 2 --bind-to none python tests/perf/symmetric.py [MIB]

In each round each has its turn; of three calls the fastest counts, of the ranks the slowest.
Medians over the rounds.
"""

import statistics
import sys
import time

import torch

import hpcdist as dist

ROUNDS, CALLS = 25, 3


def main() -> None:
    """Measure and print one line of the table in docs/performance.md."""
    torch.set_num_threads(1)
    dist.init_process_group()
    nbytes = int(float(sys.argv[1] if len(sys.argv) > 1 else 25) * (1 << 20))
    n = nbytes // 4
    symmetric, ordinary = dist.zeros(n), torch.zeros(n)
    source, target = torch.ones(n), torch.zeros(n)
    blocks = dist.zeros(n), torch.zeros(n // dist.get_world_size())
    plain = torch.zeros(n), torch.zeros(n // dist.get_world_size())
    turns = {
        "floor": lambda: target.copy_(source),
        "symmetric": lambda: dist.all_reduce(symmetric),
        "ordinary": lambda: dist.all_reduce(ordinary),
        "reduce_scatter, symmetric": lambda: dist.reduce_scatter_tensor(blocks[1], blocks[0]),
        "reduce_scatter, ordinary": lambda: dist.reduce_scatter_tensor(plain[1], plain[0]),
        "all_gather, symmetric": lambda: dist.all_gather_into_tensor(plain[0], gathered[0]),
        "all_gather, ordinary": lambda: dist.all_gather_into_tensor(plain[0], gathered[1]),
    }
    part = n // dist.get_world_size()
    gathered = dist.zeros(part), torch.zeros(part)
    times: dict[str, list[float]] = {name: [] for name in turns}
    names = list(turns)
    for turn in range(ROUNDS):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            best = torch.tensor([1e9], dtype=torch.float64)
            for _ in range(CALLS):
                dist.barrier()
                began = time.perf_counter()
                turns[name]()
                best[0] = min(float(best), time.perf_counter() - began)
            dist.all_reduce(best, dist.ReduceOp.MAX)
            times[name].append(float(best) * 1e6)
    if dist.get_rank() == 0:
        floor = statistics.median(times["floor"])
        for name, each in times.items():
            median = statistics.median(each)
            print(f"{nbytes} bytes, {name}: {median:.0f} us, {median / floor:.2f} x the floor")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
