"""The collectives of a step: inputs, the call, and what must come out, by NumPy.

Every value depends on the step, the rank and the place, so that a result of another step, of
another rank or of another piece is a wrong one.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np

import hpcdist as dist
from chaos.program import OBJECTS, Step
from hpcdist import ReduceOp

#: What outputs hold before the call.
STALE = 113

Call = Callable[[bool], Any]
Check = Callable[[], str]

_PLACES = np.arange(1_210_000, dtype=np.int64) * 7


def values(step: Step, rank: int, size: int, part: int = 0) -> np.ndarray:
    """What a rank brings to a step: whole numbers from 1 to 53, so that sums are exact."""
    mixed = (_PLACES[:size] + (rank * 17 + step.number * 29 + part * 11)) % 53 + 1
    return mixed.astype(step.dtype)


def compare(got: Any, want: np.ndarray, near: float = 0.0) -> str:
    """What is wrong with a result, or an empty text."""
    got = np.asarray(got)
    if got.shape != want.shape:
        return f"shape {got.shape}, not {want.shape}"
    if near:
        wrong = ~np.isclose(got, want, rtol=near, atol=0)
    else:
        wrong = got != want
    if not wrong.any():
        return ""
    first = int(np.flatnonzero(wrong)[0])
    where = f"element {first} is {got.flat[first]}, not {want.flat[first]}"
    return f"{where} ({int(wrong.sum())} of {got.size} differ)"


def all_of(checks: list[tuple[Any, np.ndarray]]) -> str:
    """The first thing that is wrong with several results."""
    for i, (got, want) in enumerate(checks):
        text = compare(got, want)
        if text:
            return f"output {i}: {text}"
    return ""


class Case:
    """One step as one rank makes it."""

    def __init__(self, step: Step, pg: Any, wrap: Callable[[np.ndarray], Any]) -> None:
        self.step, self.pg, self.wrap = step, pg, wrap
        self.rank, self.ranks = pg.rank(), pg.size()

    def mine(self, part: int = 0) -> np.ndarray:
        return values(self.step, self.rank, self.step.size, part)

    def data(self, rank: int, part: int = 0, size: int | None = None) -> np.ndarray:
        return values(self.step, rank, self.step.size if size is None else size, part)

    def empty(self, size: int | None = None) -> np.ndarray:
        return np.full(self.step.size if size is None else size, STALE, self.step.dtype)

    def is_root(self) -> bool:
        return self.rank == self.step.root

    def op(self) -> Any:
        name = self.step.reduction
        return ReduceOp.PREMUL_SUM(0.5) if name == "PREMUL_SUM" else getattr(ReduceOp, name)

    def reduced(self, part: int = 0, size: int | None = None) -> np.ndarray:
        """What the reduction over all ranks must give."""
        name = self.step.reduction
        rows = np.stack([self.data(rank, part, size) for rank in range(self.ranks)])
        if name == "AVG":
            return (rows.sum(0) / self.ranks).astype(self.step.dtype)
        if name == "PREMUL_SUM":
            return (rows * np.array(0.5, self.step.dtype)).sum(0).astype(self.step.dtype)
        function = {
            "SUM": np.add, "PRODUCT": np.multiply, "MIN": np.minimum, "MAX": np.maximum,
            "BAND": np.bitwise_and, "BOR": np.bitwise_or, "BXOR": np.bitwise_xor,
        }[name]  # fmt: skip
        return function.reduce(rows, 0, self.step.dtype)

    def near(self) -> float:
        """How far a result may be off: only division rounds."""
        if self.step.reduction != "AVG":
            return 0.0
        return 4e-3 if self.step.dtype == "float16" else 1e-6

    def options(self, async_op: bool) -> dict[str, Any]:
        return {"group": self.pg, "async_op": async_op}


def _all_reduce(c: Case) -> tuple[Call, Check]:
    t = c.mine()
    given = c.wrap(t)
    return (
        lambda a: dist.all_reduce(given, c.op(), **c.options(a)),
        lambda: compare(t, c.reduced(), c.near()),
    )


def _all_reduce_coalesced(c: Case) -> tuple[Call, Check]:
    ts = [c.mine(part) for part in range(3)]
    given = [c.wrap(t) for t in ts]
    return (
        lambda a: dist.all_reduce_coalesced(given, c.op(), **c.options(a)),
        lambda: next(
            filter(None, (compare(t, c.reduced(i), c.near()) for i, t in enumerate(ts))), ""
        ),
    )


def _reduce(c: Case) -> tuple[Call, Check]:
    t = c.mine()
    given = c.wrap(t)
    return (
        lambda a: dist.reduce(given, op=c.op(), group_dst=c.step.root, **c.options(a)),
        lambda: compare(t, c.reduced() if c.is_root() else c.mine(), c.near()),
    )


def _reduce_scatter(c: Case) -> tuple[Call, Check]:
    sizes = [c.step.size + (i if c.step.number % 2 else 0) for i in range(c.ranks)]
    ts = [c.data(c.rank, i, size) for i, size in enumerate(sizes)]
    out = c.empty(sizes[c.rank])
    given, into = [c.wrap(t) for t in ts], c.wrap(out)
    return (
        lambda a: dist.reduce_scatter(into, given, c.op(), **c.options(a)),
        lambda: compare(out, c.reduced(c.rank, sizes[c.rank]), c.near()),
    )


def _reduce_scatter_tensor(c: Case) -> tuple[Call, Check]:
    whole = c.data(c.rank, 0, c.step.size * c.ranks)
    out = c.empty()
    given, into = c.wrap(whole), c.wrap(out)
    n = c.step.size
    return (
        lambda a: dist.reduce_scatter_tensor(into, given, c.op(), **c.options(a)),
        lambda: compare(out, c.reduced(0, n * c.ranks)[c.rank * n : (c.rank + 1) * n], c.near()),
    )


def _broadcast(c: Case) -> tuple[Call, Check]:
    t = c.mine()
    given = c.wrap(t)
    return (
        lambda a: dist.broadcast(given, group_src=c.step.root, **c.options(a)),
        lambda: compare(t, c.data(c.step.root)),
    )


def _all_gather(c: Case) -> tuple[Call, Check]:
    sizes = [c.step.size + (i if c.step.number % 2 else 0) for i in range(c.ranks)]
    outs = [c.empty(size) for size in sizes]
    given, into = c.wrap(c.data(c.rank, 0, sizes[c.rank])), [c.wrap(out) for out in outs]
    return (
        lambda a: dist.all_gather(into, given, **c.options(a)),
        lambda: all_of([(outs[i], c.data(i, 0, size)) for i, size in enumerate(sizes)]),
    )


def _all_gather_into_tensor(c: Case) -> tuple[Call, Check]:
    out = c.empty(c.step.size * c.ranks)
    given, into = c.wrap(c.mine()), c.wrap(out)
    return (
        lambda a: dist.all_gather_into_tensor(into, given, **c.options(a)),
        lambda: compare(out, np.concatenate([c.data(i) for i in range(c.ranks)])),
    )


def _all_gather_coalesced(c: Case) -> tuple[Call, Check]:
    # one list a tensor, with an output of each rank
    outs = [[c.empty() for _ in range(2)] for _ in range(c.ranks)]
    given = [c.wrap(c.mine(part)) for part in range(2)]
    into = [[c.wrap(out) for out in row] for row in outs]
    return (
        lambda a: dist.all_gather_coalesced(into, given, **c.options(a)),
        lambda: all_of(
            [(outs[i][part], c.data(i, part)) for i in range(c.ranks) for part in range(2)]
        ),
    )


def _gather(c: Case) -> tuple[Call, Check]:
    sizes = [c.step.size + (i if c.step.number % 2 else 0) for i in range(c.ranks)]
    outs = [c.empty(size) for size in sizes] if c.is_root() else []
    given = c.wrap(c.data(c.rank, 0, sizes[c.rank]))
    into = [c.wrap(out) for out in outs] if c.is_root() else None
    return (
        lambda a: dist.gather(given, into, group_dst=c.step.root, **c.options(a)),
        lambda: all_of([(out, c.data(i, 0, sizes[i])) for i, out in enumerate(outs)]),
    )


def _scatter(c: Case) -> tuple[Call, Check]:
    sizes = [c.step.size + (i if c.step.number % 2 else 0) for i in range(c.ranks)]
    out = c.empty(sizes[c.rank])
    into = c.wrap(out)
    given = None
    if c.is_root():
        given = [c.wrap(c.data(c.rank, i, size)) for i, size in enumerate(sizes)]
    return (
        lambda a: dist.scatter(into, given, group_src=c.step.root, **c.options(a)),
        lambda: compare(out, c.data(c.step.root, c.rank, sizes[c.rank])),
    )


def _piece(c: Case, source: int, to: int) -> int:
    """Elements that one rank sends to another in an all_to_all."""
    each = c.step.size // c.ranks
    return each + ((3 * source + to) % 3 if c.step.number % 2 else 0)


def _all_to_all(c: Case) -> tuple[Call, Check]:
    given = [c.wrap(c.data(c.rank, i, _piece(c, c.rank, i))) for i in range(c.ranks)]
    outs = [c.empty(_piece(c, i, c.rank)) for i in range(c.ranks)]
    into = [c.wrap(out) for out in outs]
    return (
        lambda a: dist.all_to_all(into, given, **c.options(a)),
        lambda: all_of(
            [(out, c.data(i, c.rank, _piece(c, i, c.rank))) for i, out in enumerate(outs)]
        ),
    )


def _all_to_all_single(c: Case) -> tuple[Call, Check]:
    sent = [_piece(c, c.rank, i) for i in range(c.ranks)]
    got = [_piece(c, i, c.rank) for i in range(c.ranks)]
    given = c.wrap(np.concatenate([c.data(c.rank, i, n) for i, n in enumerate(sent)]))
    out = c.empty(sum(got))
    into = c.wrap(out)
    return (
        lambda a: dist.all_to_all_single(into, given, got, sent, **c.options(a)),
        lambda: compare(out, np.concatenate([c.data(i, c.rank, n) for i, n in enumerate(got)])),
    )


def _barrier(c: Case) -> tuple[Call, Check]:
    return lambda a: dist.barrier(**c.options(a)), lambda: ""


def _monitored_barrier(c: Case) -> tuple[Call, Check]:
    timeout = timedelta(seconds=c.pg.carrier.timeout)
    return lambda a: dist.monitored_barrier(c.pg, timeout), lambda: ""


def thing(step: Step, rank: int, part: int = 0) -> Any:
    """The object that a rank brings; some fit in no short message."""
    extra = b"x" * (step.size if step.size < 20_000 else 20_000)
    return {"step": step.number, "rank": rank, "part": part, "bytes": extra}


def _difference(got: Any, want: Any) -> str:
    return "" if got == want else f"{str(got)[:120]}, not {str(want)[:120]}"


def _broadcast_object_list(c: Case) -> tuple[Call, Check]:
    objects = [thing(c.step, c.step.root, i) if c.is_root() else None for i in range(2)]
    return (
        lambda a: dist.broadcast_object_list(objects, group=c.pg, group_src=c.step.root),
        lambda: _difference(objects, [thing(c.step, c.step.root, i) for i in range(2)]),
    )


def _all_gather_object(c: Case) -> tuple[Call, Check]:
    objects: list[Any] = [None] * c.ranks
    return (
        lambda a: dist.all_gather_object(objects, thing(c.step, c.rank), c.pg),
        lambda: _difference(objects, [thing(c.step, i) for i in range(c.ranks)]),
    )


def _gather_object(c: Case) -> tuple[Call, Check]:
    objects: list[Any] | None = [None] * c.ranks if c.is_root() else None
    return (
        lambda a: dist.gather_object(
            thing(c.step, c.rank), objects, group=c.pg, group_dst=c.step.root
        ),
        lambda: _difference(objects, [thing(c.step, i) for i in range(c.ranks)]) if objects else "",
    )


def _scatter_object_list(c: Case) -> tuple[Call, Check]:
    out: list[Any] = [None]
    given = [thing(c.step, c.rank, i) for i in range(c.ranks)] if c.is_root() else None
    return (
        lambda a: dist.scatter_object_list(out, given, group=c.pg, group_src=c.step.root),
        lambda: _difference(out[0], thing(c.step, c.step.root, c.rank)),
    )


BUILDERS: dict[str, Callable[[Case], tuple[Call, Check]]] = {
    name[1:]: function
    for name, function in dict(globals()).items()
    if name.startswith("_") and name[1:] in dir(dist) and callable(function)
}
assert len(BUILDERS) == 19, sorted(BUILDERS)
assert set(OBJECTS) <= set(BUILDERS)
