"""What the tests of groups over NCCL share."""

from __future__ import annotations

from collections.abc import Iterator

import over_mpi as ring
import pytest
import standin

import hpcdist as dist
from hpcdist.backends import cuda, cuda_over_mpi


@pytest.fixture(scope="module")
def runtime() -> Iterator[standin.Runtime]:
    """The stand-ins for NCCL, and for CUDA's streams and events, in place."""
    standin.load()
    made = standin.Runtime()
    cuda.use(made)
    yield made
    if dist.is_initialized():
        dist.destroy_process_group()
    cuda.use(None)


@pytest.fixture
def over_mpi(monkeypatch, _process_group, runtime) -> None:
    """A default group over MPI for CUDA tensors too, with short buffers."""
    monkeypatch.setenv("HPCDIST_CUDA_CHUNK", str(ring.CHUNK))
    runtime.lag = 0.0
    there = dist.is_initialized() and dist.group.WORLD._backends.get("cuda")
    if not isinstance(there, cuda_over_mpi.StagedGroup):
        ring.start()
