"""Tensors that share memory: the right numbers, or a refusal; never the wrong numbers."""

import numpy as np
import pytest
import torch
from aliasing import Case, operations, overlaps, refused
from cases import Check, here

import hpcdist as dist

#: Elements of a block: in one message, and in more bytes than lists that are packed together.
SIZES = (6, 80_000)


def outcome(operation, case, size, later):
    """Call it; the exception if there was one."""
    try:
        work = operation.call(*case.tensors(), size, later)
        if work is not None:
            work.wait()
    except (ValueError, dist.DistError) as error:
        return error
    return None


def wrong(case, operation, inputs, before, rank, size):
    """What is not as the reference has it."""
    wanted = operation.expect(inputs, rank, size)
    for k, (found, right) in enumerate(zip(case.outs, wanted, strict=True)):
        if not np.array_equal(found, right):
            return f"output {k} is {found[:8]}, not {right[:8]}"
    rest = case.elsewhere()
    if not np.array_equal(case.memory[rest], before[rest]):
        return "memory outside the outputs was changed"
    return ""


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
                label = f"{name}, {overlap}, async {later}"
                everybody = [Case.of(operation, plans[r][number], r, size, n) for r in range(size)]
                inputs = [each.read(operation) for each in everybody]
                who = [r for r in range(size) if refused(name, everybody[r], r, size)]
                case = everybody[rank]
                before = case.memory.copy()
                error = outcome(operation, case, size, later)
                cases += 1
                if not who:
                    text = error or wrong(case, operation, inputs, before, rank, size)
                elif rank in who:
                    fits = isinstance(error, ValueError) and (
                        "overlap" in str(error) or "lies in" in str(error)
                    )
                    text = "" if fits else f"not refused: {error}"
                else:
                    text = "" if isinstance(error, dist.DistError) else f"not told: {error}"
                if who and not np.array_equal(case.memory, before):
                    text = f"{text}; a refused call changed memory"
                check.that(not text, f"{label}: {text}")
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
                everybody = [Case.of(operation, mine[r], r, size, n) for r in range(size)]
                if refused(name, everybody[odd], odd, size) or (n > 100 and number % 5):
                    continue
                inputs = [each.read(operation) for each in everybody]
                case = everybody[rank]
                before = case.memory.copy()
                error = outcome(operation, case, size, False)
                text = error or wrong(case, operation, inputs, before, rank, size)
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
