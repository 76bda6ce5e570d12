"""All-reduce built by hand from isend and irecv: the ring algorithm, in chunks.

    mpirun -n 4 --oversubscribe python examples/04_ring_all_reduce.py

Ranks stand in a ring, and the tensor is cut into as many segments as there are ranks. In each step
every rank sends one segment to the right and receives another from the left.

1. Reduce-scatter, size - 1 steps: what arrives is added to the own segment, which travels on in the
   next step. In the end each rank owns one complete segment.
2. All-gather, size - 1 steps: the complete segments go round once more.

Every rank sends 2 (size - 1) / size of the tensor, however many ranks there are, which is the least
possible. Segments travel in chunks, so that a rank adds one while the next is still under way.

The example checks the result against ``dist.all_reduce`` and times both.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
from say import title
from where import add_options, start

import hpcdist as dist


def ring_all_reduce(tensor: torch.Tensor, chunk: int = 65_536) -> None:
    """Add up a contiguous tensor over all ranks, in place.

    Parameters
    ----------
    tensor : torch.Tensor
        The same shape and dtype on all ranks.
    chunk : int
        Elements per message.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % size, (rank - 1) % size
    segments = list(tensor.view(-1).tensor_split(size))

    def exchange(outgoing: torch.Tensor, incoming: torch.Tensor) -> Iterator[int]:
        """Send and receive a segment; give the number of each chunk as soon as it is there."""
        receives = [dist.irecv(part, src=left) for part in incoming.split(chunk)]
        sends = [dist.isend(part, dst=right) for part in outgoing.split(chunk)]
        # Messages between two ranks do not overtake each other: chunks arrive in order.
        for number, receive in enumerate(receives):
            receive.wait()
            yield number
        for send in sends:
            send.wait()

    arriving = torch.empty_like(segments[0])  # the first segment is the longest
    for step in range(size - 1):
        outgoing, own = segments[(rank - step) % size], segments[(rank - step - 1) % size]
        incoming = arriving[: own.numel()]
        sums, parts = own.split(chunk), incoming.split(chunk)
        for number in exchange(outgoing, incoming):
            sums[number].add_(parts[number])
    for step in range(size - 1):
        for _ in exchange(segments[(rank + 1 - step) % size], segments[(rank - step) % size]):
            pass


def seconds(function: Callable[[torch.Tensor], object], tensor: torch.Tensor, rounds: int) -> float:
    """Time the best of some calls, in seconds; the slowest rank counts."""
    tensor = torch.zeros_like(tensor)  # sums of sums would overflow
    times = []
    for _ in range(rounds):
        dist.barrier()
        began = time.perf_counter()
        function(tensor)
        if tensor.is_cuda:
            torch.cuda.synchronize()  # calls return when they are enqueued
        times.append(time.perf_counter() - began)
    best = torch.tensor([min(times)], dtype=torch.float64)
    dist.all_reduce(best, op=dist.ReduceOp.MAX)
    return best.item()


def main() -> None:
    parser = argparse.ArgumentParser(description="Ring all-reduce against dist.all_reduce.")
    parser.add_argument("--chunk", type=int, default=65_536, help="elements per message")
    parser.add_argument("--rounds", type=int, default=5, help="calls to time per size")
    parser.add_argument("--largest", type=int, default=1 << 22, help="elements of the largest size")
    arguments = add_options(parser).parse_args()
    if min(arguments.chunk, arguments.rounds, arguments.largest) < 1:
        parser.error("--chunk, --rounds and --largest must be positive")

    device = start(arguments)
    rank, size = dist.get_rank(), dist.get_world_size()
    title(f"float32 sums over {size} rank(s), best of {arguments.rounds}")
    if rank == 0:
        print("  elements      KiB    ring us  all_reduce us  difference")
    elements = 1
    while elements <= arguments.largest:
        generator = torch.Generator().manual_seed(rank)
        mine = torch.rand(elements, generator=generator, device="cpu").to(device)
        by_hand, reference = mine.clone(), mine.clone()
        ring_all_reduce(by_hand, arguments.chunk)
        dist.all_reduce(reference)
        # The two add in different orders, so float32 rounding may differ in the last digits.
        difference = (by_hand - reference).abs().max()
        dist.all_reduce(difference, op=dist.ReduceOp.MAX)
        if difference.item() > 1e-6 * size:
            raise AssertionError(f"{elements} elements: off by {difference.item()}")

        ring = seconds(partial(ring_all_reduce, chunk=arguments.chunk), mine, arguments.rounds)
        built_in = seconds(dist.all_reduce, mine, arguments.rounds)
        if rank == 0:
            print(
                f"{elements:>10} {elements * 4 / 1024:>8.1f} {ring * 1e6:>10.1f} "
                f"{built_in * 1e6:>14.1f} {difference.item():>11.1e}",
                flush=True,
            )
        elements *= 8
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
