"""Messages between two ranks: send, recv, isend, irecv, tags, any source, batches.

mpirun -n 4 --oversubscribe python examples/02_point_to_point.py
"""

from __future__ import annotations

import sys

import torch
from say import say, title
from where import options, start

import hpcdist as dist


def blocking(rank: int) -> None:
    """Rank 0 sends, rank 1 receives. Both calls return when their tensor may be used again."""
    if rank == 0:
        dist.send(torch.arange(4.0), dst=1)
        say("sent [0, 1, 2, 3] to rank 1")
    elif rank == 1:
        # The receiver brings the memory: same dtype and number of elements as the sender's.
        data = torch.empty(4)
        sender = dist.recv(data, src=0)
        say(f"received {data.tolist()} from rank {sender}")
    else:
        say("is not part of this")


def ring(rank: int, size: int) -> None:
    """Everybody sends to the right and receives from the left.

    With blocking sends this can hang: every rank would wait for a receiver that is itself stuck in
    its send. isend and irecv return at once; the tensors belong to the messages until wait().
    """
    outgoing, incoming = torch.tensor([rank * 10]), torch.empty(1, dtype=torch.int64)
    works = [
        dist.isend(outgoing, dst=(rank + 1) % size),
        dist.irecv(incoming, src=(rank - 1) % size),
    ]
    for work in works:
        work.wait()
    say(f"has {incoming.item()} from its left neighbour")


def tags(rank: int) -> None:
    """A tag tells messages between the same two ranks apart, whatever order they are sent in."""
    if rank == 0:
        dist.send(torch.tensor([1.5]), dst=1, tag=15)
        dist.send(torch.tensor([2.5]), dst=1, tag=25)
        say("sent 1.5 with tag 15, then 2.5 with tag 25")
    elif rank == 1:
        first, second = torch.empty(1), torch.empty(1)
        late = dist.irecv(first, src=0, tag=15)
        dist.recv(second, src=0, tag=25)
        late.wait()
        say(f"took tag 25: {second.item()}, and tag 15: {first.item()}")
    else:
        say("is not part of this")


def any_source(rank: int, size: int) -> None:
    """Rank 0 takes results as they come, from whoever is done first."""
    if rank > 0:
        dist.send(torch.tensor([rank**2]), dst=0)
        say(f"sent {rank**2}")
    else:
        squares = {}
        for _ in range(size - 1):
            result = torch.empty(1, dtype=torch.int64)
            sender = dist.recv(result)  # no src: any source; returns who it was
            squares[sender] = result.item()
        say(f"received {dict(sorted(squares.items()))}")


def halo_exchange(rank: int, size: int) -> None:
    """Trade edges with both neighbours, as a simulation on a divided grid does every step.

    A batch starts all its messages together, so their order cannot cause a deadlock.
    """
    cells = torch.full((3,), float(rank))
    left, right = torch.full((1,), -1.0), torch.full((1,), -1.0)  # -1: the end of the grid
    operations = []
    if rank > 0:
        operations += [dist.P2POp(dist.isend, cells[:1], rank - 1)]
        operations += [dist.P2POp(dist.irecv, left, rank - 1)]
    if rank < size - 1:
        operations += [dist.P2POp(dist.isend, cells[-1:], rank + 1)]
        operations += [dist.P2POp(dist.irecv, right, rank + 1)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    say(f"{left.tolist()} {cells.tolist()} {right.tolist()}")


def main() -> None:
    start(options(__doc__))  # init_process_group, and where new tensors go
    rank, size = dist.get_rank(), dist.get_world_size()
    if size < 2:
        sys.exit("this needs at least two ranks: mpirun -n 2 python examples/02_point_to_point.py")
    title("send and recv")
    blocking(rank)
    title("a ring of isend and irecv")
    ring(rank, size)
    title("tags")
    tags(rank)
    title("any source")
    any_source(rank, size)
    title("a halo exchange in one batch")
    halo_exchange(rank, size)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
