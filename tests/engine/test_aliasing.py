"""Tensors that share memory: the right numbers, or a refusal; never the wrong numbers."""

import pytest
import torch
from aliasing import Case, judge, operations, outcome, overlaps, refused
from cases import Check, here

import hpcdist as dist

pytestmark = pytest.mark.ranks

#: Elements of a block: in one message, and in more bytes than lists that are packed together.
SIZES = (6, 80_000)


@pytest.mark.parametrize("n", SIZES)
def test_every_operation_with_every_overlap(n, count):
    check, (rank, size) = Check(), here()
    cases = 0
    for name, operation in operations():
        plans = [list(overlaps(operation, r, size, n)) for r in range(size)]
        for number, overlap in enumerate(plans[rank]):
            if n > 100 and number % (3 * size):
                continue  # the same code, only more of it
            for later in (False, True):
                everybody = [
                    Case.make(operation, plans[r][number], r, size, n) for r in range(size)
                ]
                text = judge(
                    name,
                    operation,
                    everybody,
                    lambda case, op=operation, later=later: outcome(
                        op, case.tensors(), size, later
                    ),
                    rank,
                )
                cases += 1
                check.that(not text, f"{name}, {overlap}, async {later}: {text}")
    count(cases)
    check.done()


def test_one_rank_alone_overlaps(count):
    """Whether tensors overlap is one rank's own matter: the others make the same calls."""
    check, (rank, size) = Check(), here()
    cases = 0
    for n in SIZES:
        for name, operation in operations():
            plans = [list(overlaps(operation, r, size, n)) for r in range(size)]
            for number in range(len(plans[0])):
                odd = number % size
                mine = [plans[r][number if r == odd else 0] for r in range(size)]
                everybody = [Case.make(operation, mine[r], r, size, n) for r in range(size)]
                if refused(name, everybody[odd], odd, size) or (n > 100 and number % 5):
                    continue
                text = judge(
                    name,
                    operation,
                    everybody,
                    lambda case, op=operation: outcome(op, case.tensors(), size, False),
                    rank,
                )
                check.that(not text, f"{name}, rank {odd} alone, {mine[odd]}: {text}")
                cases += 1
    count(cases)
    check.done()


def test_mixed_layouts_at_the_own_place():
    """What stays on a rank is copied as memory: its elements must lie in the same order."""
    check, (rank, size) = Check(), here()
    turned = torch.arange(6.0).reshape(3, 2).t()
    plain = [torch.zeros(2, 3) for _ in range(size)]
    alone = dist.new_group([rank], use_local_synchronization=True)
    for label, call in {
        "gather": lambda: dist.gather(turned, plain[:1], rank, group=alone),
        "scatter": lambda: dist.scatter(plain[0], [turned], rank, group=alone),
        "all_to_all": lambda: dist.all_to_all(plain[:1], [turned], group=alone),
        "all_gather": lambda: dist.all_gather(plain[:1], turned, group=alone),
        "reduce_scatter": lambda: dist.reduce_scatter(plain[0], [turned], group=alone),
    }.items():
        try:
            call()
        except ValueError as error:
            check.that("strides" in str(error), f"{label}: {error}")
        else:
            check.that(False, f"{label}: no error")
    dist.destroy_process_group(alone)
    check.done()
