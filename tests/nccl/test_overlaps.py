"""CUDA tensors over NCCL that share memory: the right numbers, or a refusal."""

from __future__ import annotations

from datetime import timedelta

import aliasing
import cases
import pytest
import torch
from aliasing import Case, refused_by_nccl
from standin import cpu, gpu

import hpcdist as dist


@pytest.fixture
def nccl(runtime, _process_group):
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("cpu:mpi,cuda:nccl", timeout=timedelta(seconds=20))


def test_every_operation_with_every_overlap(nccl, count):
    check, (rank, size) = cases.Check(), cases.here()
    made, n = 0, 6
    for name, operation in aliasing.operations():
        if "block by block" in name:
            continue
        plans = [list(aliasing.overlaps(operation, r, size, n)) for r in range(size)]
        for number, overlap in enumerate(plans[rank]):
            everybody = [Case.of(operation, plans[r][number], r, size, n) for r in range(size)]
            refuse = [refused_by_nccl(name, everybody[r], r, size) for r in range(size)]
            if len(set(refuse)) > 1:
                continue  # the others would wait for the rank that refuses

            def call(case, operation=operation, later=bool(number % 2)):
                block = gpu(torch.from_numpy(case.memory))
                error = aliasing.outcome(operation, case.pieces_of(block), size, later)
                case.memory[:] = cpu(block).numpy()
                return error

            text = aliasing.judge(name, operation, everybody, call, rank, refused_by_nccl)
            made += 1
            check.that(not text, f"{name}, {overlap}: {text}")
    count(made)
    check.done()
