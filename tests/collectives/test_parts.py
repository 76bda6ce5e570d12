"""Operations of several parts: an exception between two of them on one rank ends all of them."""

from __future__ import annotations

import dis
import functools
import os
import sys
import time
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from cases import Check, here

import hpcdist as dist
from hpcdist.optim import ZeroRedundancyOptimizer
from hpcdist.parallel.averaging import average_parameters
from hpcdist.testing import parallel_assert

pytestmark = [pytest.mark.ranks, pytest.mark.mpi(min_size=2)]

#: Seconds. The promise is at once; the test may share its cores with anything.
AT_ONCE = 5.0
PACKAGE = os.path.dirname(dist.__file__)
#: Where the operations below are made.
PLACES = (
    "collectives/ groups/sparse.py testing/ backends/ parallel/averaging.py parallel/sync.py "
    "parallel/zero.py parallel/describe.py groups/comparison.py parallel/ddp/module.py"
)
FILES = tuple(f"{PACKAGE}/{place}" for place in PLACES.split())
assert all(map(os.path.exists, FILES))


class Broken(BaseException):
    """What a signal handler raises, at a line of hpcdist's own."""


@functools.cache
def unreachable(code: types.CodeType) -> set[int]:
    """Where tracing can raise, and a signal handler cannot.

    From Python 3.12 on, an exception of a trace function skips __exit__ at the end of a ``with``
    and where a comprehension repeats. A handler runs after a call or a repetition, and then
    __exit__ is called.
    """
    if sys.version_info < (3, 12):
        return set()
    steps = list(dis.get_instructions(code))
    ends = {
        steps[i].offset
        for i in range(len(steps) - 3)
        if all(step.opname == "LOAD_CONST" and step.argval is None for step in steps[i : i + 3])
        and steps[i + 3].opname == "CALL"
    }
    return ends | {step.offset for step in steps if step.opname == "JUMP_BACKWARD"}


class Breaks:
    """Raises at the n-th line of hpcdist's after a group's first collective in the block."""

    def __init__(self, comm: Any, n: int) -> None:
        self.comm, self.left, self.before = comm, n, comm.seq

    def __enter__(self) -> Breaks:
        sys.settrace(self.look)
        return self

    def __exit__(self, *exc: object) -> None:
        sys.settrace(None)
        torch.set_grad_enabled(True)  # where a no_grad() was not left

    def look(self, frame: Any, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(FILES):
            return None
        if frame.f_lasti in unreachable(frame.f_code):
            return self.look
        if event == "line" and self.comm.seq != self.before:
            self.left -= 1
            if self.left < 0:
                sys.settrace(None)
                raise Broken
        return self.look


def sparse() -> torch.Tensor:
    return torch.sparse_coo_tensor(torch.tensor([[0, 2]]), torch.ones(2), (5,))


def on_first(values: list[Any]) -> list[Any] | None:
    return values if here()[0] == 0 else None


def asserts(group: Any) -> None:
    try:
        parallel_assert(here()[0] != 0, "on purpose", group)
    except AssertionError as error:
        assert "on purpose" in str(error)


def unlike(group: Any) -> None:
    try:
        ddp = dist.DistributedDataParallel
        ddp(torch.nn.Linear(3, 2 + (here()[0] == 0)), process_group=group)
    except dist.DistMismatchError as error:
        if "same model" not in str(error):
            raise


def averaged(group: Any) -> None:
    kinds = (torch.float32, torch.float64, torch.float16)
    average_parameters([torch.ones(3, dtype=d) for d in kinds], group)


def optimizer(group: Any) -> ZeroRedundancyOptimizer:
    """Without views, so that each rank sends its share in a burst of its own."""
    kinds = (torch.float32, torch.float64, torch.float16)
    parameters = [torch.nn.Parameter(torch.ones(3, dtype=kind)) for kind in 4 * kinds]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    return ZeroRedundancyOptimizer(parameters, torch.optim.SGD, group, lr=0.1)


kept_optimizer = functools.cache(optimizer)


MODEL = torch.nn.Sequential(torch.nn.Linear(600, 600), torch.nn.Linear(600, 600))
CALLS: dict[str, Callable[[Any], Any]] = {
    "broadcast_object_list": lambda g: dist.broadcast_object_list(["x"], 0, g),
    "all_gather_object": lambda g: dist.all_gather_object([0] * here()[1], 1, g),
    "gather_object": lambda g: dist.gather_object(1, on_first([0] * here()[1]), 0, g),
    "scatter_object_list": lambda g: dist.scatter_object_list([0], on_first([1] * here()[1]), 0, g),
    "of a sparse tensor": lambda g: dist.all_reduce(sparse(), group=g),
    "parallel_assert": asserts,
    "average_parameters": averaged,
    "ZeRO": optimizer,
    "step of ZeRO": lambda g: kept_optimizer(g).step(),
    "DDP": lambda g: dist.DistributedDataParallel(MODEL, process_group=g),
    "DDP of unlike models": unlike,
}


@pytest.mark.deadline(120)
@pytest.mark.parametrize("between_nodes", [False, True], ids=["shared memory", "MPI"])
@pytest.mark.parametrize("name", CALLS)
def test_an_exception_at_each_line_between_parts(name, between_nodes, monkeypatch, count):
    """One rank raises, the others do at once, and the group goes on."""
    if between_nodes:
        monkeypatch.setenv("HPCDIST_CHECK_TRANSPORT", "mpi")
    check, (rank, size) = Check(), here()
    group, calm, n = dist.new_group(), dist.new_group(), 0
    for each in (calm, group):
        CALLS[name](each)  # what the first call imports takes seconds
    goes_on = np.ones(1, np.int64)
    step = 3 if between_nodes or name in ("DDP", "DDP of unlike models", "ZeRO") else 1
    while goes_on[0]:
        odd, error = n % size, None
        dist.barrier(calm)
        began, breaks = time.monotonic(), Breaks(group.carrier, n if rank == odd else 10**9)
        try:
            with breaks:
                CALLS[name](group)
        except (Broken, dist.DistError) as raised:
            error = raised
        spent = time.monotonic() - began
        wanted = type(None) if breaks.left >= 0 else Broken
        if rank == odd:
            check.that(isinstance(error, wanted), f"line {n}: {error!r}")
            goes_on[0] = breaks.left < 0
        else:
            check.that(not error or "could not take part" in str(error), f"line {n}: {error!r}")
        check.that(spent < AT_ONCE, f"line {n}: {spent:.2f} s")
        total = np.ones(3)
        try:
            dist.all_reduce(total, group=group)
        except dist.DistError as out_of_step:
            check.that(False, f"after line {n}: {out_of_step}")
        check.that(total[0] == size, f"after line {n}: {total}")
        dist.broadcast(goes_on, odd, group=calm)
        n += step
    count(n // step)
    check.done()
    kept_optimizer.cache_clear()
    for each in (group, calm):
        dist.destroy_process_group(each)
