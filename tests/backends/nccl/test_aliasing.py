"""CUDA tensors over NCCL that share memory: the right numbers, or a refusal."""

from __future__ import annotations

from datetime import timedelta

import cases
import pytest
from aliasing import refused_by_nccl
from device_aliasing import check_all

import hpcdist as dist

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
