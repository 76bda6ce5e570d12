"""The generated calls of :mod:`aliasing` with tensors of the stand-in's GPU."""

from __future__ import annotations

from collections.abc import Callable

import aliasing
import cases
import torch
from aliasing import Case
from standin import cpu, gpu

Rule = Callable[[str, Case, int, int], bool]


def check_all(check: cases.Check, n: int, rule: Rule, mixed: bool) -> int:
    """Make every operation with every overlap; how many calls there were.

    Parameters
    ----------
    check : cases.Check
        Where problems are collected.
    n : int
        Elements of a block.
    rule : callable
        Whether a rank must refuse its arguments, as :func:`aliasing.refused`.
    mixed : bool
        Also where some ranks refuse and others do not.
    """
    (rank, size), made = cases.here(), 0
    for name, operation in aliasing.operations():
        if "block by block" in name:
            continue  # by PREMUL_SUM, which is for floats on NCCL alone
        plans = [list(aliasing.overlaps(operation, r, size, n)) for r in range(size)]
        for number, overlap in enumerate(plans[rank]):
            later = bool(number % 2)
            everybody = [Case.make(operation, plans[r][number], r, size, n) for r in range(size)]
            refuse = {rule(name, everybody[r], r, size) for r in range(size)}
            if len(refuse) > 1 and not mixed:
                continue

            def call(case, operation=operation, later=later):
                block = gpu(torch.from_numpy(case.memory))
                error = aliasing.outcome(operation, case.pieces_of(block), size, later)
                case.memory[:] = cpu(block).numpy()
                return error

            text = aliasing.judge(name, operation, everybody, call, rank, rule)
            made += 1
            check.that(not text, f"{name}, {overlap}, async {later}: {text}")
    return made
