"""Several MPI ranks on one GPU, their tensors over MPI: started by run.py with mpirun.

    mpirun -n 2 python tests/gpu/ranks.py correct
    mpirun -n 2 python tests/gpu/ranks.py --device cpu correct    # tries this program itself

The last line of rank 0 is what the table gets; anything wrong ends with an error.
"""

from __future__ import annotations

import argparse
import sys

import torch

import hpcdist as dist
from hpcdist import ReduceOp, config, dtypes

DEVICE = "cuda"


def settle() -> None:
    """Wait for everything on the GPU."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def draw(dtype: torch.dtype, count: int, rank: int) -> torch.Tensor:
    """Small whole numbers on the host, the same wherever they are drawn: sums of them are exact."""
    generator = torch.Generator().manual_seed(1000 * rank + count % 997)
    return torch.randint(0, 2, (count,), generator=generator).to(torch.float32).to(dtype)


def put(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the device."""
    return tensor.to(DEVICE, copy=True)


def equal(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """To the last bit."""
    found = found.cpu().reshape(-1)
    return torch.equal(found.view(torch.uint8), wanted.reshape(-1).view(torch.uint8))


def correct() -> str:
    """Every operation beside the same one on host tensors, around the edges of a buffer."""
    rank, size, count = dist.get_rank(), dist.get_world_size(), 0
    chunk = config.get("cuda_chunk")

    def check(good: bool, *what: object) -> None:
        nonlocal count
        count += 1
        if not good:
            raise AssertionError(f"rank {rank}: wrong: {what}")

    for dtype in dtypes.DTYPES:
        kind = dtype.torch_dtype
        edge = chunk // dtype.itemsize
        for n in (0, 1, edge - 1, edge, 3 * edge + 5):
            own = draw(kind, n, rank)
            ops = dtype.ops if n in (1, 3 * edge + 5) else dtype.ops[:1]
            for name in ops:
                op = ReduceOp.PREMUL_SUM(2.0) if name == "PREMUL_SUM" else ReduceOp(name)
                here, there = own.clone(), put(own)
                dist.all_reduce(here, op)
                dist.all_reduce(there, op)
                # of AVG the division may round where the sum was: the same kernels make both
                check(equal(there, here), "all_reduce", kind, n, name)
            there = put(own)
            work = dist.broadcast(there, size - 1, async_op=True)
            work.wait()
            check(equal(there, draw(kind, n, size - 1)), "broadcast", kind, n)
            outs = [torch.zeros(n, dtype=torch.float32).to(kind).to(DEVICE) for _ in range(size)]
            dist.all_gather(outs, put(own))
            check(all(equal(out, draw(kind, n, r)) for r, out in enumerate(outs)), "all_gather", n)
            if size > 1 and rank < 2:  # both directions at once
                back, other = put(torch.zeros_like(own)), 1 - rank
                batch = [dist.P2POp(dist.isend, put(own), other),
                         dist.P2POp(dist.irecv, back, other)]  # fmt: skip
                for each in dist.batch_isend_irecv(batch):
                    each.wait()
                check(equal(back, draw(kind, n, other)), "messages", kind, n)
    rows = 300_000
    for call in (_scattered, _exchanged):
        check(call(rows, rank, size), call.__name__)
    check(_streams(rank, size), "streams")
    settle()
    dist.barrier()
    return f"{size} ranks on one GPU: {count} checks right on each"


def _scattered(rows: int, rank: int, size: int) -> bool:
    whole = torch.arange(rows * size, dtype=torch.int32, device=DEVICE) + rank
    part = torch.empty(rows, dtype=torch.int32, device=DEVICE)
    dist.reduce_scatter_tensor(part, whole)
    wanted = torch.arange(rows * rank, rows * rank + rows, dtype=torch.int32) * size
    return equal(part, wanted + sum(range(size)))


def _exchanged(rows: int, rank: int, size: int) -> bool:
    splits = [rows + rank + other for other in range(size)]
    out = torch.empty(sum(splits), dtype=torch.int64, device=DEVICE)
    dist.all_to_all_single(out, torch.full((sum(splits),), rank, device=DEVICE), splits, splits)
    return equal(out, torch.arange(size).repeat_interleave(torch.tensor(splits)))


def _streams(rank: int, size: int) -> bool:
    """Operations of several streams in flight, between kernels that write and read the tensors."""
    if DEVICE != "cuda":
        return True
    streams = [torch.cuda.Stream() for _ in range(3)]
    kept = []
    for turn in range(12):
        with torch.cuda.stream(streams[turn % 3]):
            big = torch.randn(2048, 2048, device=DEVICE)
            for _ in range(4):
                big = big @ big  # keeps the stream busy before the tensor is written
            data = torch.full((3_000_000,), float(turn), device=DEVICE)
            kept.append((turn, data, dist.all_reduce(data, async_op=True)))
    good = True
    for turn, data, work in kept:
        with torch.cuda.stream(streams[turn % 3]):
            work.wait()
            good &= bool((data == turn * size).all())
    return good


def main() -> None:
    global DEVICE
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("correct",))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    chosen = parser.parse_args()
    DEVICE = chosen.device
    if DEVICE == "cuda":
        if not torch.cuda.is_available():
            sys.exit("no GPU that torch can use")
        torch.cuda.set_device(0)
    dist.init_process_group("mpi")
    said = correct()
    if dist.get_rank() == 0:
        print(said, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
