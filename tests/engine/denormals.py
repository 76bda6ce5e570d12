"""The program that test_denormals.py starts: sums while threads that flush denormals are in MPI.

    HPCDIST_NODES=2 HPCDIST_TWO_LEVEL=on mpirun -n 4 python denormals.py

Between nodes MPI adds in whichever thread is inside it. Here the lane waits for a long sum, and the
main thread, for which the program has set that denormals are zero, sends messages meanwhile.
"""

from __future__ import annotations

from datetime import timedelta

import torch
from ending_parts import say

import hpcdist as dist

#: The bits of a denormal float32; no sum of four is above the least normal number.
BITS = 1000
ROUNDS = 12


def main() -> None:
    dist.init_process_group(timeout=timedelta(seconds=40))
    torch.set_num_threads(1)
    flushes = torch.set_flush_denormal(True)
    rank, size, beside = dist.get_rank(), dist.get_world_size(), dist.new_group()
    sent, got, wrong = torch.ones(20_000), torch.empty(20_000), 0
    for _ in range(ROUNDS):
        tensor = torch.full((1 << 20,), BITS, dtype=torch.int32).view(torch.float32)
        work = dist.all_reduce(tensor, async_op=True)
        for _ in range(20):
            other = rank ^ (size // 2)
            receive, send = dist.irecv(got, other, beside), dist.isend(sent, other, beside)
            receive.wait()
            send.wait()
        work.wait()
        wrong += not tensor.view(torch.int32).eq(BITS * size).all()
    say(f"rank {rank}: {wrong} of {ROUNDS} sums are wrong{'' if flushes else ', cannot flush'}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
