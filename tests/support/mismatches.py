"""Generated calls that ranks make differently: every collective with every difference that it has.

A *call* is made from a :class:`Spec`. The odd rank makes it from a spec with one field changed, so
a case is a pair of specs; nobody writes the cases down one by one.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

import hpcdist as dist
from hpcdist import ReduceOp


@dataclass(frozen=True)
class Spec:
    """What one rank passes."""

    name: str
    shape: tuple[int, ...] = (2, 3)
    dtype: torch.dtype = torch.float32
    op: Any = ReduceOp.SUM
    root: int = 0
    turned: bool = False  # dense, but with the strides of a transposed tensor
    length: int = 2  # of coalesced lists and lists of objects
    async_op: bool = False
    group: Any = None

    def tensor(self) -> torch.Tensor:
        """One tensor as this rank would pass it."""
        if self.turned:
            return torch.ones(self.shape[::-1], dtype=self.dtype).t()
        return torch.ones(self.shape, dtype=self.dtype)

    def each(self) -> list[torch.Tensor]:
        """One tensor for each rank of the group."""
        return [self.tensor() for _ in range(dist.get_world_size(self.group))]

    def whole(self, size: int) -> torch.Tensor:
        """The tensors of all ranks as one."""
        return torch.ones((size * self.shape[0], *self.shape[1:]), dtype=self.dtype)


def _calls() -> dict[str, Callable[[Spec, int, int, dict[str, Any]], Any]]:
    """Operation -> how a rank calls it."""

    def lists(s: Spec, rank: int) -> list[torch.Tensor] | None:
        return s.each() if rank == s.root else None

    return {
        "all_reduce": lambda s, r, n, k: dist.all_reduce(s.tensor(), s.op, **k),
        "all_reduce_coalesced": lambda s, r, n, k: dist.all_reduce_coalesced(
            [s.tensor() for _ in range(s.length)], s.op, **k
        ),
        "reduce": lambda s, r, n, k: dist.reduce(s.tensor(), s.root, s.op, **k),
        "broadcast": lambda s, r, n, k: dist.broadcast(s.tensor(), s.root, **k),
        "all_gather": lambda s, r, n, k: dist.all_gather(s.each(), s.tensor(), **k),
        "all_gather_into_tensor": lambda s, r, n, k: dist.all_gather_into_tensor(
            s.whole(n), s.tensor(), **k
        ),
        "all_gather_coalesced": lambda s, r, n, k: dist.all_gather_coalesced(
            [[s.tensor() for _ in range(s.length)] for _ in range(n)],
            [s.tensor() for _ in range(s.length)],
            **k,
        ),
        "gather": lambda s, r, n, k: dist.gather(s.tensor(), lists(s, r), s.root, **k),
        "scatter": lambda s, r, n, k: dist.scatter(s.tensor(), lists(s, r), s.root, **k),
        "reduce_scatter": lambda s, r, n, k: dist.reduce_scatter(s.tensor(), s.each(), s.op, **k),
        "reduce_scatter_tensor": lambda s, r, n, k: dist.reduce_scatter_tensor(
            s.tensor(), s.whole(n), s.op, **k
        ),
        "all_to_all": lambda s, r, n, k: dist.all_to_all(s.each(), s.each(), **k),
        "all_to_all_single": lambda s, r, n, k: dist.all_to_all_single(s.whole(n), s.whole(n), **k),
        "barrier": lambda s, r, n, k: dist.barrier(**k),
        "broadcast_object_list": lambda s, r, n, k: dist.broadcast_object_list(
            ["x"] * s.length, s.root, k["group"]
        ),
        "all_gather_object": lambda s, r, n, k: dist.all_gather_object(
            [None] * (n + s.length), "x", k["group"]
        ),
        "gather_object": lambda s, r, n, k: dist.gather_object(
            "x", [None] * n if r == s.root else None, s.root, k["group"]
        ),
        "scatter_object_list": lambda s, r, n, k: dist.scatter_object_list(
            [None], ["x"] * n if r == s.root else None, s.root, k["group"]
        ),
    }


CALLS = _calls()
OBJECTS = {name for name in CALLS if "object" in name}
REDUCTIONS = {name for name in CALLS if "reduce" in name}
ROOTED = {"reduce", "broadcast", "gather", "scatter", "gather_object", "scatter_object_list"}
ROOTED |= {"broadcast_object_list"}
LISTED = {"all_reduce_coalesced", "all_gather_coalesced", "broadcast_object_list"}
LISTED |= {"all_gather_object"}
#: Their tensors must be C-contiguous: other strides are a ValueError before anybody hears of them.
PLAIN = {"all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single"}


def make(spec: Spec) -> Any:
    """Call the operation as this rank."""
    keywords: dict[str, Any] = {"group": spec.group}
    if spec.name not in OBJECTS:
        keywords["async_op"] = spec.async_op
    size = dist.get_world_size(spec.group)
    return CALLS[spec.name](spec, dist.get_rank(spec.group), size, keywords)


def differences(name: str, size: int) -> Iterator[tuple[str, Spec, Spec]]:
    """Each way in which one rank may call otherwise: what differs, its spec, the others' spec."""
    usual = Spec(name)
    for other in CALLS:
        if other != name:
            yield f"operation {other}", replace(usual, name=other), usual

    def fields(**changed: Any) -> tuple[Spec, Spec]:
        return replace(usual, **changed), usual

    if name in ROOTED:
        yield "root", *fields(root=size - 1)
    if name in LISTED:
        yield "list length", *fields(length=3)
    if name in OBJECTS or name == "barrier":
        return
    yield "shape", *fields(shape=(4, 3))
    yield "shape, empty", *fields(shape=(0, 3))
    yield "same-count shape", *fields(shape=(3, 2))
    yield "same-count shape, more dimensions", *fields(shape=(2, 3, 1))
    if name not in PLAIN:
        yield "strides", *fields(turned=True)
    yield "dtype", *fields(dtype=torch.float64)
    yield "dtype of the same width", *fields(dtype=torch.int32)
    if name in REDUCTIONS:
        yield "reduce-op", *fields(op=ReduceOp.MAX)
        yield "reduce-op AVG", *fields(op=ReduceOp.AVG)
        half, quarter = (replace(usual, op=ReduceOp.PREMUL_SUM(x)) for x in (0.5, 0.25))
        yield "factor", half, quarter


def modes(name: str) -> list[tuple[str, bool, bool]]:
    """Who calls asynchronously: label, the odd rank, the others."""
    if name in OBJECTS:
        return [("sync", False, False)]
    return [
        ("sync", False, False),
        ("async", True, True),
        ("async against sync", True, False),
        ("sync against async", False, True),
    ]


def cases(size: int, order: random.Random) -> list[tuple[str, Spec, Spec]]:
    """All cases in a random order that the ranks share: label, the odd rank's spec, the others'."""
    found = []
    for name in CALLS:
        usual = Spec(name)
        different = [*differences(name, size), ("nothing else", usual, usual)]
        for what, odd, usual in different:
            for mode, odd_async, usual_async in modes(name):
                pair = replace(odd, async_op=odd_async), replace(usual, async_op=usual_async)
                if pair[0] != pair[1]:
                    found.append((f"{name}: {what}, {mode}", *pair))
    order.shuffle(found)
    return found
