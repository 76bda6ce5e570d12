"""The programs that test_endings.py starts under mpirun: CUDA tensors over MPI, and bad ends.

mpirun -n 2 python endings.py NAME
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "support"))

os.environ["HPCDIST_CUDA_CHUNK"] = "4096"

import standin  # noqa: E402
import torch  # noqa: E402
from over_mpi import copies, empty  # noqa: E402
from standin import cpu, gpu  # noqa: E402

import hpcdist as dist  # noqa: E402
from hpcdist.backends import cuda  # noqa: E402

#: Elements of twenty buffers.
N = 20_000


def say(text: str) -> None:
    """Print a line in one piece."""
    os.write(1, f"{text}\n".encode())


def killed(runtime: standin.Runtime, rank: int) -> None:
    """Rank 1 is killed between two pieces; the others wait for it in an operation and a message."""

    def kill(number: int) -> None:
        if number == 15:
            os.kill(os.getpid(), signal.SIGKILL)

    dist.all_reduce(gpu(torch.ones(3)))
    dist.barrier()
    if rank == 0:
        say(f"began {time.time():.3f}")
    with copies(runtime, on_copy=kill if rank == 1 else None):
        try:
            dist.all_reduce(gpu(torch.ones(N)))
        except dist.RankFailedError as error:
            say(f"rank {rank} all_reduce: {error}")
            try:
                dist.recv(empty(N, torch.float32), 1)
            except dist.RankFailedError as again:
                say(f"rank {rank} recv: {again}")
            raise


def outstanding(runtime: standin.Runtime, rank: int) -> None:
    """Operations in flight at the end that all have started: they complete."""
    runtime.lag = 1e-4
    kept = [gpu(torch.full((N,), float(i))) for i in range(3)]
    for data in kept:
        dist.all_reduce(data, async_op=True)
    got = empty(N, torch.float32)
    if rank == 0:
        dist.isend(kept[2].clone().fill_(7), 1)
    else:
        dist.irecv(got, 0)
    RESULT.append((rank, kept, got))


#: What the end of the program has to leave right.
RESULT: list = []


def look() -> None:
    """Runs after hpcdist's part of the end, and before MPI's."""
    for rank, kept, got in RESULT:

        def there(rank=rank, kept=kept, got=got) -> bool:
            sums = all(bool((cpu(data) == 2 * i).all()) for i, data in enumerate(kept))
            return sums and (rank == 0 or bool((cpu(got) == 7).all()))

        # nobody waited for the handles: the last copies are in a stream of the group's own
        until = time.monotonic() + 2.0
        while not (good := there()) and time.monotonic() < until:
            time.sleep(0.001)
        say(f"rank {rank} has what it was to get: {good}")


def forgotten(runtime: standin.Runtime, rank: int) -> None:
    """Rank 0 ends with an operation in flight that rank 1 never starts."""
    if rank == 0:
        dist.all_reduce(gpu(torch.ones(N)), async_op=True)
    else:
        time.sleep(120)


def main() -> None:
    torch.set_num_threads(1)
    atexit.register(look)
    standin.load()
    runtime = standin.Runtime()
    cuda.use(runtime)
    dist.init_process_group("mpi", timeout=timedelta(seconds=60))
    globals()[sys.argv[1]](runtime, dist.get_rank())


if __name__ == "__main__":
    main()
