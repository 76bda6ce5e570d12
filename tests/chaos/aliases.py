"""Inputs that are outputs: the call must give what separate tensors give, or be refused by all."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

import hpcdist as dist
from chaos.cases import Call, Case, Check, all_of, compare

Built = tuple[Call, Check]


def _split(c: Case, flat: np.ndarray) -> list[np.ndarray]:
    n = c.step.size
    return [flat[i * n : (i + 1) * n] for i in range(c.ranks)]


def _all_gather(c: Case, which: int) -> Built:
    flat = c.data(c.rank, 0, c.step.size * c.ranks)
    outs = _split(c, flat)
    n, first = c.step.size, which * c.step.size
    want = [c.data(i, 0, n * c.ranks)[first : first + n] for i in range(c.ranks)]
    into = [c.wrap(out) for out in outs]
    return (
        lambda a: dist.all_gather(into, into[which], **c.options(a)),
        lambda: all_of(list(zip(outs, want, strict=True))),
    )


def _all_gather_into_tensor(c: Case, which: int) -> Built:
    flat = c.data(c.rank, 0, c.step.size * c.ranks)
    n, first = c.step.size, which * c.step.size
    want = [c.data(i, 0, n * c.ranks)[first : first + n] for i in range(c.ranks)]
    given, into = c.wrap(_split(c, flat)[which]), c.wrap(flat)
    return (
        lambda a: dist.all_gather_into_tensor(into, given, **c.options(a)),
        lambda: compare(flat, np.concatenate(want)),
    )


def _gather(c: Case, which: int) -> Built:
    flat = c.data(c.rank, 0, c.step.size * c.ranks)
    outs, n, first = _split(c, flat), c.step.size, which * c.step.size
    want = [c.data(i, 0, n * c.ranks)[first : first + n] for i in range(c.ranks)]
    into = [c.wrap(out) for out in outs]
    return (
        lambda a: dist.gather(
            into[which], into if c.is_root() else None, group_dst=c.step.root, **c.options(a)
        ),
        lambda: all_of(list(zip(outs, want, strict=True))) if c.is_root() else "",
    )


def _scatter(c: Case, which: int) -> Built:
    flat = c.data(c.rank, 0, c.step.size * c.ranks)
    n = c.step.size
    want = c.data(c.step.root, 0, n * c.ranks)[c.rank * n : (c.rank + 1) * n]
    outs = _split(c, flat)
    given = [c.wrap(out) for out in outs]
    return (
        lambda a: dist.scatter(
            given[which], given if c.is_root() else None, group_src=c.step.root, **c.options(a)
        ),
        lambda: compare(outs[which], want),
    )


def _reduce_scatter_tensor(c: Case, which: int) -> Built:
    flat = c.data(c.rank, 0, c.step.size * c.ranks)
    n, out = c.step.size, _split(c, flat)[which]
    want = c.reduced(0, n * c.ranks)[c.rank * n : (c.rank + 1) * n]
    given, into = c.wrap(flat), c.wrap(out)
    return (
        lambda a: dist.reduce_scatter_tensor(into, given, c.op(), **c.options(a)),
        lambda: compare(out, want, c.near()),
    )


def _reduce_scatter(c: Case, which: int) -> Built:
    flat = c.data(c.rank, 0, c.step.size * c.ranks)
    n, outs = c.step.size, _split(c, flat)
    want = c.reduced(0, n * c.ranks)[c.rank * n : (c.rank + 1) * n]
    given = [c.wrap(out) for out in outs]
    return (
        lambda a: dist.reduce_scatter(given[which], given, c.op(), **c.options(a)),
        lambda: compare(outs[which], want, c.near()),
    )


def _all_to_all_single(c: Case, which: int) -> Built:
    flat = c.data(c.rank, 0, c.step.size * c.ranks)
    n = c.step.size
    want = [c.data(i, 0, n * c.ranks)[c.rank * n : (c.rank + 1) * n] for i in range(c.ranks)]
    both = c.wrap(flat)
    return (
        lambda a: dist.all_to_all_single(both, both, **c.options(a)),
        lambda: compare(flat, np.concatenate(want)),
    )


def _all_to_all(c: Case, which: int) -> Built:
    flat = c.data(c.rank, 0, c.step.size * c.ranks)
    n, outs = c.step.size, _split(c, flat)
    want = [c.data(i, 0, n * c.ranks)[c.rank * n : (c.rank + 1) * n] for i in range(c.ranks)]
    both = [c.wrap(out) for out in outs]
    turned = [both[(i + which) % c.ranks] for i in range(c.ranks)]
    found = [outs[(i + which) % c.ranks] for i in range(c.ranks)]
    return (
        lambda a: dist.all_to_all(turned, both, **c.options(a)),
        lambda: all_of(list(zip(found, want, strict=True))),
    )


KINDS: list[Callable[[Case, int], Built]] = [
    _all_gather, _all_gather_into_tensor, _gather, _scatter, _reduce_scatter,
    _reduce_scatter_tensor, _all_to_all, _all_to_all_single,
]  # fmt: skip


def build(case: Case) -> Built:
    """A call in which outputs overlap inputs; the step's number says which."""
    which = case.step.number // len(KINDS) % case.ranks
    return KINDS[case.step.number % len(KINDS)](case, which)
