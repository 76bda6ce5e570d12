"""Operations in which all ranks take part.

    mpirun -n 4 --oversubscribe python examples/03_collectives.py

All ranks call the same operations in the same order. If one of them does not, hpcdist raises on
every rank and says who called what, as the last part shows.
"""

from __future__ import annotations

import numpy as np
import torch
from say import say, title
from where import options, start

import hpcdist as dist


def one_to_all(rank: int, size: int) -> None:
    """broadcast: everybody gets the same. scatter: everybody gets a part."""
    title("broadcast and scatter from rank 0")
    data = torch.arange(3.0) if rank == 0 else torch.zeros(3)
    dist.broadcast(data, src=0)
    part = torch.empty(2)
    parts = [torch.full((2,), float(r)) for r in range(size)] if rank == 0 else None
    dist.scatter(part, parts, src=0)
    say(f"broadcast {data.tolist()}   scatter {part.tolist()}")


def all_to_one(rank: int, size: int) -> None:
    """reduce: one rank gets the sum. gather: one rank gets the pieces."""
    last = size - 1
    title(f"reduce and gather to rank {last}")
    total = torch.tensor([rank + 1])
    dist.reduce(total, dst=last, op=dist.ReduceOp.PRODUCT)
    mine = torch.tensor([rank])
    pieces = [torch.empty(1, dtype=torch.int64) for _ in range(size)] if rank == last else None
    dist.gather(mine, pieces, dst=last)
    if pieces is not None:
        say(f"product {total.item()}   pieces {[piece.item() for piece in pieces]}")
    else:
        say("has nothing to show")


def all_reduce(rank: int) -> None:
    """Every rank gets the result, on all of them the same to the last bit."""
    title("all_reduce")
    results = []
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT):
        value = torch.tensor([rank + 1.0])
        dist.all_reduce(value, op=op)
        results.append(f"{op.name} {value.item():g}")
    # NumPy arrays, and anything else with the buffer protocol, work in the same places.
    array = np.array([rank, -rank], dtype=np.int32)
    dist.all_reduce(array, op=dist.ReduceOp.MIN)
    say("   ".join(results) + f"   MIN of NumPy arrays {array.tolist()}")


def asynchronous(rank: int, size: int) -> None:
    """Start, do something else, wait. Until then the tensor belongs to the operation."""
    title("all_reduce in the background")
    value = torch.full((1000,), float(rank))
    work = dist.all_reduce(value, async_op=True)
    meanwhile = sum(i * i for i in range(10_000))
    work.wait()
    assert value.eq(size * (size - 1) / 2).all()
    say(f"counted to {meanwhile} while 1000 numbers were added up to {value[0].item():g} each")


def uneven(rank: int, size: int) -> None:
    """Ranks may contribute different amounts, as long as all know how much comes from whom."""
    title("all_gather and all_to_all_single with uneven parts")
    mine = torch.full((rank + 1,), float(rank))
    everything = [torch.empty(r + 1) for r in range(size)]
    dist.all_gather(everything, mine)
    # Each rank sends r + 1 elements to rank r, so rank r receives r + 1 from everyone.
    to_send = [r + 1 for r in range(size)]
    to_receive = [rank + 1] * size
    outgoing = torch.full((sum(to_send),), rank)
    incoming = torch.empty(sum(to_receive), dtype=outgoing.dtype)
    dist.all_to_all_single(incoming, outgoing, to_receive, to_send)
    say(f"gathered {torch.cat(everything).tolist()}   exchanged {incoming.tolist()}")


def halves(rank: int, size: int) -> None:
    """The two halves of an all_reduce, useful on their own when memory is short."""
    title("reduce_scatter_tensor, then all_gather_into_tensor")
    gradient = torch.arange(2.0 * size) + rank
    shard = torch.empty(2)
    dist.reduce_scatter_tensor(shard, gradient)
    whole = torch.empty(2 * size)
    dist.all_gather_into_tensor(whole, shard)
    say(f"shard {shard.tolist()}   whole {whole.tolist()}")


def objects(rank: int, size: int) -> None:
    """Python values: slower than tensors, handy for settings and results."""
    title("objects")
    settings = [{"lr": 0.1, "layers": (64, 32)}] if rank == 0 else [None]
    dist.broadcast_object_list(settings, src=0)
    names = [None] * size
    dist.all_gather_object(names, f"worker-{rank}")
    say(f"{settings[0]} {names}")


def a_mistake(rank: int, size: int) -> None:
    """One rank passes another shape. Nobody hangs and nobody computes nonsense."""
    title("a mistake: the last rank's tensor is longer")
    wrong = torch.zeros(4 if rank < size - 1 else 5)
    try:
        dist.all_reduce(wrong)
    except dist.DistMismatchError as error:
        say(error if rank == 0 else "raised the same")
    else:
        say("is alone, so there is nobody to disagree with")
    dist.barrier()  # the group is still usable


def main() -> None:
    start(options(__doc__))  # init_process_group, and where new tensors go
    rank, size = dist.get_rank(), dist.get_world_size()
    one_to_all(rank, size)
    all_to_one(rank, size)
    all_reduce(rank)
    asynchronous(rank, size)
    uneven(rank, size)
    halves(rank, size)
    objects(rank, size)
    a_mistake(rank, size)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
