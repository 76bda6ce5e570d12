"""Calls that move blocks: each makes one with n elements per block, and notes what is wrong."""

import torch
from cases import OPS, draw, finish, here, poison, reference

import hpcdist as dist

GUARD = 3  # elements on both sides of an output


class Guarded:
    """A poisoned output at an odd address, and what lies beside it."""

    def __init__(self, dtype, n):
        self.whole = poison(dtype, n + 2 * GUARD)
        self.tensor = self.whole[GUARD : GUARD + n]
        self.beside = poison(dtype, GUARD)

    def look(self, check, label):
        check.equal(self.whole[:GUARD], self.beside, f"{label}: before")
        check.equal(self.whole[len(self.whole) - GUARD :], self.beside, f"{label}: behind")


def uneven(n: int, size: int) -> list[int]:
    """Lengths about n, one of them 0 if there are several."""
    return [0 if r == 1 else n + 7 * r for r in range(size)]


def reduce_scatter_tensor(check, rng, group, dtype, n, async_op, op="SUM", name="", own=False):
    rank, size = here()
    parts = [draw(rng, dtype, n * size + 1)[1:] for _ in range(size)]
    want = reference(op, [part[rank * n : (rank + 1) * n] for part in parts])
    source, out = parts[rank].clone(), Guarded(dtype, n)
    target = source[rank * n : (rank + 1) * n] if own else out.tensor
    call = dist.reduce_scatter_tensor
    finish(call(target, source, OPS[op], group=group, async_op=async_op), async_op)
    check.near(target, *want, name)
    others = torch.arange(n * size) // max(n, 1) != rank
    check.equal(source[others] if own else source, parts[rank][others] if own else parts[rank],
                f"{name}: the input")  # fmt: skip
    out.look(check, name)


def reduce_scatter(check, rng, group, dtype, n, async_op, op="SUM", name="", own=False, even=False):
    rank, size = here()
    lengths = [n] * size if even else uneven(n, size)
    parts = [[draw(rng, dtype, m) for m in lengths] for _ in range(size)]
    want = reference(op, [part[rank] for part in parts])
    given, out = [part.clone() for part in parts[rank]], Guarded(dtype, lengths[rank])
    target = given[rank] if own else out.tensor
    call = dist.reduce_scatter
    finish(call(target, given, OPS[op], group=group, async_op=async_op), async_op)
    check.near(target, *want, name)
    for r in range(size):
        if r != rank or not own:
            check.equal(given[r], parts[rank][r], f"{name}: input {r}")
    out.look(check, name)


def all_gather_into_tensor(check, rng, group, dtype, n, async_op, name="", at=None):
    """at: where in the output the input lies, in elements; None: elsewhere."""
    rank, size = here()
    parts = [draw(rng, dtype, n) for _ in range(size)]
    out, source = Guarded(dtype, n * size), parts[rank].clone()
    if at is not None:
        source = out.tensor[at : at + n].copy_(source)
    finish(
        dist.all_gather_into_tensor(out.tensor, source, group=group, async_op=async_op), async_op
    )
    check.equal(out.tensor, torch.cat(parts), name)
    check.everywhere(out.tensor, name)
    out.look(check, name)


def all_gather(check, rng, group, dtype, n, async_op, name="", at=None, even=False):
    """at: the output that the input lies in."""
    rank, size = here()
    parts = [draw(rng, dtype, m) for m in ([n] * size if even else uneven(n, size))]
    outs, source = [Guarded(dtype, len(part)) for part in parts], parts[rank].clone()
    tensors = [out.tensor for out in outs]
    if at is not None:
        source = tensors[at].copy_(source)
    finish(dist.all_gather(tensors, source, group=group, async_op=async_op), async_op)
    for r, out in enumerate(outs):
        check.equal(out.tensor, parts[r], f"{name}: of {r}")
        out.look(check, f"{name}: of {r}")


def all_to_all_single(check, rng, group, dtype, n, async_op, name=""):
    rank, size = here()
    parts = [draw(rng, dtype, n * size) for _ in range(size)]
    out = Guarded(dtype, n * size)
    call = dist.all_to_all_single
    finish(call(out.tensor, parts[rank].clone(), group=group, async_op=async_op), async_op)
    check.equal(out.tensor, torch.cat([p[rank * n : (rank + 1) * n] for p in parts]), name)
    out.look(check, name)


def all_to_all(check, rng, group, dtype, n, async_op, name="", sizes=None):
    rank, size = here()
    parts = [[draw(rng, dtype, n + (sizes or 0) * (r + q)) for q in range(size)]
             for r in range(size)]  # fmt: skip
    outs = [Guarded(dtype, len(parts[r][rank])) for r in range(size)]
    tensors = [out.tensor for out in outs]
    sent = [part.clone() for part in parts[rank]]
    finish(dist.all_to_all(tensors, sent, group=group, async_op=async_op), async_op)
    for r, out in enumerate(outs):
        check.equal(out.tensor, parts[r][rank], f"{name}: of {r}")
        out.look(check, f"{name}: of {r}")


def broadcast(check, rng, group, dtype, n, async_op, name="", root=None):
    rank, size = here()
    root = n % size if root is None else root
    value, out = draw(rng, dtype, n), Guarded(dtype, n)
    if rank == root:
        out.tensor.copy_(value)
    call = dist.broadcast
    finish(call(out.tensor, group_src=root, group=group, async_op=async_op), async_op)
    check.equal(out.tensor, value, f"{name} from {root}")
    out.look(check, name)


def reduce(check, rng, group, dtype, n, async_op, op="SUM", name="", root=None):
    """The others' tensors stay as they are."""
    rank, size = here()
    root = n % size if root is None else root
    parts = [draw(rng, dtype, n) for _ in range(size)]
    out = Guarded(dtype, n)
    out.tensor.copy_(parts[rank])
    call = dist.reduce
    finish(call(out.tensor, group_dst=root, op=OPS[op], group=group, async_op=async_op), async_op)
    if rank == root:
        check.near(out.tensor, *reference(op, parts), f"{name} to {root}")
    else:
        check.equal(out.tensor, parts[rank], f"{name} to {root}")
    out.look(check, name)


def gather(check, rng, group, dtype, n, async_op, name="", root=None, differ=0, at=None):
    """differ: by how many elements ranks' sizes do; at: the output that the input lies in."""
    rank, size = here()
    root = n % size if root is None else root
    parts = [draw(rng, dtype, (n + differ * r) * (r != 1 or not differ)) for r in range(size)]
    outs, source = [Guarded(dtype, len(part)) for part in parts], parts[rank].clone()
    if at is not None and rank == root:
        source = outs[at].whole[: len(source)].copy_(source)
    tensors = [out.tensor for out in outs] if rank == root else None
    call = dist.gather
    finish(call(source, tensors, group_dst=root, group=group, async_op=async_op), async_op)
    for r in range(size if rank == root else 0):
        check.equal(outs[r].tensor, parts[r], f"{name}: of {r}")
        if r != at:
            outs[r].look(check, f"{name}: of {r}")


def scatter(check, rng, group, dtype, n, async_op, name="", root=None, differ=0, at=None):
    """The same; at: the input that the root's output lies in."""
    rank, size = here()
    root = n % size if root is None else root
    parts = [draw(rng, dtype, (n + differ * r) * (r != 1 or not differ)) for r in range(size)]
    given, out = [part.clone() for part in parts], Guarded(dtype, len(parts[rank]))
    target = given[at] if at is not None and rank == root else out.tensor
    call = dist.scatter
    finish(call(target, given if rank == root else None, group_src=root, group=group,
                async_op=async_op), async_op)  # fmt: skip
    check.equal(target, parts[rank], f"{name} from {root}")
    for r in range(size):
        if r != at:
            check.equal(given[r], parts[r], f"{name}: input {r}")
    out.look(check, name)


def all_to_all_uneven(check, rng, group, dtype, n, async_op, name=""):
    all_to_all(check, rng, group, dtype, n, async_op, name, sizes=11)


def all_to_all_blocks(check, rng, group, dtype, n, async_op, name=""):
    """all_to_all_single by splits; one rank sends nothing, and nothing goes to one."""
    rank, size = here()
    lengths = [[(n + 5 * r + q) * (r != 1 and q != 0) for q in range(size)] for r in range(size)]
    parts = [draw(rng, dtype, sum(lengths[r])) for r in range(size)]
    blocks = [part.split(lengths[r]) for r, part in enumerate(parts)]
    out = Guarded(dtype, sum(lengths[r][rank] for r in range(size)))
    call = dist.all_to_all_single
    finish(call(out.tensor, parts[rank].clone(), [lengths[r][rank] for r in range(size)],
                lengths[rank], group=group, async_op=async_op), async_op)  # fmt: skip
    check.equal(out.tensor, torch.cat([blocks[r][rank] for r in range(size)]), name)
    out.look(check, name)


def gather_uneven(check, rng, group, dtype, n, async_op, name=""):
    gather(check, rng, group, dtype, n, async_op, name, differ=13)


def scatter_uneven(check, rng, group, dtype, n, async_op, name=""):
    scatter(check, rng, group, dtype, n, async_op, name, differ=13)


OPERATIONS = [
    reduce_scatter_tensor, reduce_scatter, all_gather_into_tensor, all_gather, all_to_all_single,
    broadcast, reduce, all_to_all, gather, scatter,
    all_to_all_uneven, all_to_all_blocks, gather_uneven, scatter_uneven,
]  # fmt: skip
