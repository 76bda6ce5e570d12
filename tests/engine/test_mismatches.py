"""Generated disagreements: whatever one rank does otherwise, all are told at once and go on."""

import random
import time

import pytest
import torch
from cases import Check, here
from long_form import LONG, deadline
from mismatches import cases, make

import hpcdist as dist

pytestmark = [pytest.mark.ranks, pytest.mark.mpi(min_size=2)]

#: Cases for each number of ranks; the long form takes all.
SOME = 400
#: Seconds. The promise is one; the short form may share its cores with anything.
AT_ONCE = 1.0 if LONG else 5.0


def wrong_text(spec) -> str:
    """Make a call that must be refused as a mismatch; says what came instead, if it did."""
    try:
        work = make(spec)
        if work is not None:
            work.wait()
    except dist.DistMismatchError as error:
        return "" if "disagree" in str(error) else f"an error without both sides: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@deadline(60, long=600)
def test_generated_mismatches(rng, count):
    check, (rank, size) = Check(), here()
    found = cases(size, random.Random(int(rng.integers(1 << 32))))
    chosen = found if LONG else found[:SOME]
    slowest = 0.0
    for number, (label, odd, usual) in enumerate(chosen):
        count.progress(number, len(chosen))
        began = time.monotonic()
        wrong = wrong_text(odd if rank == number % size else usual)
        spent = time.monotonic() - began
        slowest = max(slowest, spent)
        check.that(not wrong, f"{label}: {wrong}")
        check.that(spent < AT_ONCE, f"{label}: {spent:.2f} s")
        total = torch.full((3,), rank + 1.0)
        dist.all_reduce(total)
        usable = total.tolist() == [size * (size + 1) / 2] * 3
        check.that(usable, f"after {label}: {total.tolist()}")
        if not usable:
            break
    count(len(chosen), slowest)
    check.done()


@pytest.mark.one_node
def test_groups_used_in_different_orders(count):
    """One rank calls b, a where the others call a, b: each would wait for the other for ever."""
    check, (rank, size) = Check(), here()
    a, b = dist.new_group(), dist.new_group()
    slowest, cases = 0.0, 0
    for odd in range(size):
        for call in (dist.barrier, lambda group: dist.all_reduce(torch.ones(1000), group=group)):
            outcomes = []
            for group in (b, a) if rank == odd else (a, b):
                began = time.monotonic()
                try:
                    call(group=group)
                    outcomes.append("done")
                except dist.DistMismatchError as error:
                    outcomes.append(
                        "told" if "order in which they use" in str(error) else str(error)
                    )
                slowest = max(slowest, time.monotonic() - began)
            check.that(
                "told" in outcomes and set(outcomes) <= {"told", "done"}, f"{odd}: {outcomes}"
            )
            for group in (a, b):
                total = torch.ones(2)
                dist.all_reduce(total, group=group)
                check.that(total.tolist() == [size] * 2, f"{odd}: {total}")
            cases += 1
    check.that(slowest < AT_ONCE, f"{slowest:.2f} s")
    count(cases, slowest)
    dist.destroy_process_group(a)
    dist.destroy_process_group(b)
    check.done()
