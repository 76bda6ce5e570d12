"""Several MPI ranks on one GPU: what all_reduce costs through the pinned ring.

    mpirun -n 2 python tests/gpu/ranks_speed.py bandwidth
    mpirun -n 2 python tests/gpu/ranks_speed.py latency
    mpirun -n 2 python tests/gpu/ranks_speed.py --device cpu latency   # tries this program itself

What is compared takes turns in each round; a figure is the median over the rounds of the slowest
rank's time. The results are compared with what they must be first.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable

import torch

import hpcdist as dist
from hpcdist import ReduceOp, config

DEVICE = "cuda"
Calls = dict[str, Callable[[], object]]


def settle() -> None:
    """Wait for everything on the GPU."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def pinned(count: int) -> torch.Tensor:
    """Host memory that the copy engine reaches; on a stand-in, and on the CPU, any."""
    real = DEVICE == "cuda" and "rehearsal" not in sys.modules
    return torch.zeros(count, pin_memory=real)


def medians(calls: Calls, rounds: int, times: int = 1) -> dict[str, float]:
    """Seconds of each call."""
    taken = torch.zeros(len(calls), rounds, dtype=torch.float64)
    for turn in range(-1, rounds):
        for row, call in enumerate(calls.values()):
            dist.barrier()
            settle()
            began = time.perf_counter()
            for _ in range(times):
                call()
            settle()
            taken[row, turn] = (time.perf_counter() - began) / times  # that of -1 is replaced
    dist.all_reduce(taken, ReduceOp.MAX)
    return dict(zip(calls, taken.median(dim=1).values.tolist(), strict=True))


class Copies:
    """The copy engine by itself: a tensor out and in at once, in pieces of the ring's size."""

    def __init__(self, data: torch.Tensor) -> None:
        self.data, self.back = data, torch.empty_like(data)
        self.piece = min(config.get("cuda_chunk") // 4, data.numel())
        self.out, self.into = pinned(self.piece), pinned(self.piece)
        self.streams = [torch.cuda.Stream() for _ in range(2)] if DEVICE == "cuda" else []

    def __call__(self) -> None:
        for begin in range(0, self.data.numel(), self.piece):
            part = slice(begin, begin + self.piece)
            for way in range(2):
                if not self.streams:
                    self._copy(way, part)
                    continue
                with torch.cuda.stream(self.streams[way]):
                    self._copy(way, part)

    def _copy(self, way: int, part: slice) -> None:
        if way:
            here = self.back[part]
            here.copy_(self.into[: here.numel()], non_blocking=True)
        else:
            here = self.data[part]
            self.out[: here.numel()].copy_(here, non_blocking=True)


def check(data: torch.Tensor) -> None:
    """An all_reduce of this tensor is right."""
    data.fill_(dist.get_rank() + 1)
    dist.all_reduce(data)
    size = dist.get_world_size()
    if not bool((data == size * (size + 1) // 2).all()):
        raise AssertionError(f"rank {dist.get_rank()}: wrong sum of {data.numel()} elements")
    data.zero_()


def plain(data: torch.Tensor) -> None:
    """What a program without the ring would do."""
    host = data.cpu()
    dist.all_reduce(host)
    data.copy_(host)


def bandwidth() -> str:
    """By size: the ring, the copies alone, the reduction of host memory alone, and .cpu()."""
    told, best = [], 0.0
    # the ring's buffers are those of the settings: a rehearsal has short ones, and short tensors
    sizes = (1, 4, 16, 64, 256) if config.get("cuda_chunk") >= 1 << 20 else (1,)
    for mib in sizes:
        data, host = torch.zeros(mib << 18, device=DEVICE), pinned(mib << 18)
        check(data)
        found = medians(
            {
                "ring": lambda data=data: dist.all_reduce(data),
                "copies": Copies(data),
                "host": lambda host=host: dist.all_reduce(host),
                "cpu": lambda data=data: plain(data),
            },
            rounds=9,
        )
        bound = max(found["copies"], found["host"])
        best = 100 * bound / found["ring"]
        told.append(
            f"{mib:4} MiB   "
            + "   ".join(f"{name} {seconds * 1e3:8.3f} ms" for name, seconds in found.items())
            + f"   ring at {best:3.0f} % of the slower of copies and host"
        )
        del data, host
    size = dist.get_world_size()
    first = f"{size} ranks, {sizes[-1]} MiB: ring at {best:.0f} % of its bound (target 80 %)"
    return "\n".join([first, *told])


def latency() -> str:
    """A CUDA tensor of 8 bytes, beside a host tensor and a copy there and back."""
    data, host = torch.zeros(2, device=DEVICE), torch.zeros(2)
    check(data)
    found = medians(
        {
            "ring": lambda: dist.all_reduce(data),
            "ring, async_op and wait": lambda: dist.all_reduce(data, async_op=True).wait(),
            "copies": Copies(data),
            "host": lambda: dist.all_reduce(host),
            ".cpu()": lambda: plain(data),
        },
        rounds=15,
        times=2 if "rehearsal" in sys.modules else 100,
    )
    told = ", ".join(f"{name} {seconds * 1e6:.1f}" for name, seconds in found.items())
    return f"{dist.get_world_size()} ranks, us: {told}"


def main() -> None:
    global DEVICE
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("bandwidth", "latency"))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    chosen = parser.parse_args()
    DEVICE = chosen.device
    if DEVICE == "cuda":
        if not torch.cuda.is_available():
            sys.exit("no GPU that torch can use")
        torch.cuda.set_device(0)
    dist.init_process_group("mpi")
    said = {"bandwidth": bandwidth, "latency": latency}[chosen.what]()
    if dist.get_rank() == 0:
        print(f"RESULT\n{said}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
