"""Every collective as a function that draws its data, runs it and checks every element.

Outputs are poisoned, and what lies beside them must stay as it is. `n` counts the elements of the
part that one rank has for one other.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from cases import OPS, Check, draw, finish, here, poison, reference

import hpcdist as dist

EDGE = 3  # elements on both sides of an output


def output(dtype: torch.dtype, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A poisoned tensor at an odd address, and all of the memory around it."""
    whole = poison(dtype, n + 2 * EDGE)
    return whole[EDGE : EDGE + n], whole


def intact(check: Check, whole: torch.Tensor, label: str) -> None:
    """Note memory beside an output that was written to."""
    check.equal(whole[:EDGE], poison(whole.dtype, EDGE), f"{label}: before the output")
    check.equal(whole[-EDGE:], poison(whole.dtype, EDGE), f"{label}: behind the output")


def drawn(rng, dtype: torch.dtype, sizes) -> list[torch.Tensor]:
    """What each rank contributes; all ranks draw all of it."""
    return [draw(rng, dtype, n) for n in sizes]


def broadcast(rng, check, dtype, n, async_op, group=None):
    rank, size = here()
    for root in {0, size - 1}:
        want = draw(rng, dtype, n)
        out, whole = output(dtype, n)
        if rank == root:
            out.copy_(want)
        finish(dist.broadcast(out, root, group=group, async_op=async_op), async_op)
        check.equal(out, want, f"broadcast {dtype} n={n}")
        intact(check, whole, f"broadcast {dtype} n={n}")


def all_gather_into_tensor(rng, check, dtype, n, async_op, group=None):
    rank, size = here()
    parts = drawn(rng, dtype, [n] * size)
    for inside in (False, True):
        out, whole = output(dtype, n * size)
        mine = out[rank * n : rank * n + n] if inside else parts[rank]
        mine.copy_(parts[rank])
        work = dist.all_gather_into_tensor(out, mine, group=group, async_op=async_op)
        finish(work, async_op)
        label = f"all_gather_into_tensor {dtype} n={n} in place={inside}"
        check.equal(out, torch.cat(parts), label)
        intact(check, whole, label)


def all_gather(rng, check, dtype, n, async_op, group=None):
    rank, size = here()
    for sizes in ([n] * size, [max(0, n - r) for r in range(size)], [0] * (size - 1) + [n]):
        parts = drawn(rng, dtype, sizes)
        outs = [output(dtype, m) for m in sizes]
        work = dist.all_gather([o for o, _ in outs], parts[rank], group=group, async_op=async_op)
        finish(work, async_op)
        for r in range(size):
            check.equal(outs[r][0], parts[r], f"all_gather {dtype} {sizes}, from {r}")
            intact(check, outs[r][1], f"all_gather {dtype} {sizes}, from {r}")


def all_gather_coalesced(rng, check, dtype, n, async_op, group=None):
    rank, size = here()
    shapes = (n, 1, 0, max(1, n // 2))
    parts = [drawn(rng, dtype, shapes) for _ in range(size)]
    outs = [[poison(dtype, m) for m in shapes] for _ in range(size)]
    work = dist.all_gather_coalesced(outs, parts[rank], group=group, async_op=async_op)
    finish(work, async_op)
    for r in range(size):
        for i in range(len(shapes)):
            check.equal(outs[r][i], parts[r][i], f"all_gather_coalesced {dtype} n={n} {r} {i}")


def gather(rng, check, dtype, n, async_op, group=None):
    rank, size = here()
    for sizes in ([n] * size, [max(0, n - 2 * r) for r in range(size)]):
        for root in {0, size - 1}:
            parts = drawn(rng, dtype, sizes)
            outs = [output(dtype, m) for m in sizes] if rank == root else None
            given = [o for o, _ in outs] if outs else None
            work = dist.gather(parts[rank], given, root, group=group, async_op=async_op)
            finish(work, async_op)
            for r in range(size if outs else 0):
                check.equal(outs[r][0], parts[r], f"gather {dtype} {sizes} {root}, from {r}")
                intact(check, outs[r][1], f"gather {dtype} {sizes} {root}, from {r}")


def scatter(rng, check, dtype, n, async_op, group=None):
    rank, size = here()
    for sizes in ([n] * size, [max(0, n - 2 * r) for r in range(size)]):
        for root in {0, size - 1}:
            parts = drawn(rng, dtype, sizes)
            out, whole = output(dtype, sizes[rank])
            given = parts if rank == root else None
            work = dist.scatter(out, given, root, group=group, async_op=async_op)
            finish(work, async_op)
            check.equal(out, parts[rank], f"scatter {dtype} {sizes} {root}")
            intact(check, whole, f"scatter {dtype} {sizes} {root}")


def all_to_all(rng, check, dtype, n, async_op, group=None):
    rank, size = here()
    for step in (0, 1):
        grid = [[max(0, n - step * (r + 2 * q)) for q in range(size)] for r in range(size)]
        sent = [drawn(rng, dtype, row) for row in grid]
        outs = [output(dtype, grid[r][rank]) for r in range(size)]
        work = dist.all_to_all([o for o, _ in outs], sent[rank], group=group, async_op=async_op)
        finish(work, async_op)
        for r in range(size):
            check.equal(outs[r][0], sent[r][rank], f"all_to_all {dtype} n={n} step={step} from {r}")
            intact(check, outs[r][1], f"all_to_all {dtype} n={n} step={step} from {r}")


def all_to_all_single(rng, check, dtype, n, async_op, group=None):
    rank, size = here()
    for step in (0, 1):
        grid = [[max(0, n - step * (2 * r + q)) for q in range(size)] for r in range(size)]
        sent = [drawn(rng, dtype, row) for row in grid]
        got = [grid[r][rank] for r in range(size)]
        out, whole = output(dtype, sum(got))
        splits = (got, grid[rank]) if step else (None, None)
        work = dist.all_to_all_single(
            out, torch.cat(sent[rank]), *splits, group=group, async_op=async_op
        )
        finish(work, async_op)
        label = f"all_to_all_single {dtype} n={n} step={step}"
        check.equal(out, torch.cat([sent[r][rank] for r in range(size)]), label)
        intact(check, whole, label)


MOVES: tuple[Callable, ...] = (
    broadcast, all_gather_into_tensor, all_gather, all_gather_coalesced, gather, scatter,
    all_to_all, all_to_all_single,
)  # fmt: skip


def all_reduce(rng, check, name, dtype, n, async_op, group=None):
    rank, size = here()
    parts = drawn(rng, dtype, [n] * size)
    out, whole = output(dtype, n)
    out.copy_(parts[rank])
    finish(dist.all_reduce(out, OPS[name], group=group, async_op=async_op), async_op)
    label = f"all_reduce {name} {dtype} n={n}"
    check.near(out, *reference(name, parts), label)
    check.everywhere(out, label)
    intact(check, whole, label)


def all_reduce_coalesced(rng, check, name, dtype, n, async_op, group=None):
    rank, size = here()
    shapes = (n, 0, 1, max(1, n // 3))
    parts = [drawn(rng, dtype, shapes) for _ in range(size)]
    mine = [t.clone() for t in parts[rank]]
    finish(dist.all_reduce_coalesced(mine, OPS[name], group=group, async_op=async_op), async_op)
    for i, tensor in enumerate(mine):
        label = f"all_reduce_coalesced {name} {dtype} n={n}, {i}"
        check.near(tensor, *reference(name, [each[i] for each in parts]), label)
        check.everywhere(tensor, label)


def reduce(rng, check, name, dtype, n, async_op, group=None):
    rank, size = here()
    for root in {0, size - 1}:
        parts = drawn(rng, dtype, [n] * size)
        out, whole = output(dtype, n)
        out.copy_(parts[rank])
        finish(dist.reduce(out, root, OPS[name], group=group, async_op=async_op), async_op)
        label = f"reduce {name} {dtype} n={n} to {root}"
        if rank == root:
            check.near(out, *reference(name, parts), label)
        else:
            check.equal(out, parts[rank], f"{label}: the input changed")
        intact(check, whole, label)


def reduce_scatter_tensor(rng, check, name, dtype, n, async_op, group=None):
    rank, size = here()
    parts = drawn(rng, dtype, [n * size] * size)
    want, bound = reference(name, [p[rank * n : rank * n + n] for p in parts])
    for inside in (False, True):
        mine = parts[rank].clone()
        out, whole = output(dtype, n)
        given = mine[rank * n : rank * n + n] if inside else out
        work = dist.reduce_scatter_tensor(given, mine, OPS[name], group=group, async_op=async_op)
        finish(work, async_op)
        label = f"reduce_scatter_tensor {name} {dtype} n={n} in place={inside}"
        check.near(given, want, bound, label)
        intact(check, whole, label)


def reduce_scatter(rng, check, name, dtype, n, async_op, group=None):
    rank, size = here()
    for sizes in ([n] * size, [max(0, n - 2 * r) for r in range(size)]):
        parts = [drawn(rng, dtype, sizes) for _ in range(size)]
        out, whole = output(dtype, sizes[rank])
        mine = [t.clone() for t in parts[rank]]
        finish(dist.reduce_scatter(out, mine, OPS[name], group=group, async_op=async_op), async_op)
        label = f"reduce_scatter {name} {dtype} {sizes}"
        check.near(out, *reference(name, [p[rank] for p in parts]), label)
        intact(check, whole, label)


REDUCTIONS: tuple[Callable, ...] = (
    all_reduce, all_reduce_coalesced, reduce, reduce_scatter_tensor, reduce_scatter,
)  # fmt: skip
