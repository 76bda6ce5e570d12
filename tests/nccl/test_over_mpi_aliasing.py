"""CUDA tensors over MPI that share memory: as on the host, the right numbers or a refusal."""

from __future__ import annotations

import aliasing
import cases
import pytest
import torch
from aliasing import Case
from over_mpi import CHUNK
from standin import cpu, gpu

pytestmark = pytest.mark.usefixtures("over_mpi")

#: Elements of a block: in one buffer of pinned memory, and in several.
SIZES = (6, CHUNK // 8 + 30)


@pytest.mark.parametrize("n", SIZES)
def test_every_operation_with_every_overlap(n, count):
    check, (rank, size) = cases.Check(), cases.here()
    made = 0
    for name, operation in aliasing.operations():
        if "block by block" in name:
            continue  # by PREMUL_SUM, which is for floats on NCCL alone
        plans = [list(aliasing.overlaps(operation, r, size, n)) for r in range(size)]
        for number, overlap in enumerate(plans[rank]):
            later = bool(number % 2)
            everybody = [Case.of(operation, plans[r][number], r, size, n) for r in range(size)]

            def call(case, operation=operation, later=later):
                block = gpu(torch.from_numpy(case.memory))
                error = aliasing.outcome(operation, case.pieces_of(block), size, later)
                case.memory[:] = cpu(block).numpy()
                return error

            # an input in another one's place is copied on the device, and refused on the host
            rule = name.replace("all_gather_coalesced", "all_gather")
            text = aliasing.judge(rule, operation, everybody, call, rank)
            made += 1
            check.that(not text, f"{name}, {overlap}, async {later}: {text}")
    count(made)
    check.done()
