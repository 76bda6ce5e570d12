"""CUDA tensors over NCCL that share memory: the right numbers, or a refusal."""

from __future__ import annotations

from datetime import timedelta

import cases
import pytest
import torch
from aliasing import refused_by_nccl
from device_aliasing import check_all
from standin import gpu

import hpcdist as dist
from hpcdist.testing import parallel_raises

pytestmark = pytest.mark.standin


@pytest.fixture
def nccl(runtime, _process_group):
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("cpu:mpi,cuda:nccl", timeout=timedelta(seconds=20))


def test_every_operation_with_every_overlap(nccl, count):
    check = cases.Check()
    # where one rank alone refuses, the others would wait for it
    count(check_all(check, 6, refused_by_nccl, mixed=False))
    check.done()


def test_a_batch_that_receives_into_memory_in_use(nccl):
    rank, size = dist.get_rank(), dist.get_world_size()
    memory = gpu(torch.zeros(16))
    after, before = (rank + 1) % size, (rank - 1) % size
    for first, match in ((dist.irecv, "both are written to"), (dist.isend, "has been read")):
        batch = [
            dist.P2POp(first, memory[4:12], after if first is dist.isend else before),
            dist.P2POp(dist.irecv, memory[8:], before),
        ]
        with parallel_raises(ValueError, match=match):
            dist.batch_isend_irecv(batch)
        with parallel_raises(ValueError, match=match):
            dist.batch_isend_irecv(batch[::-1])
