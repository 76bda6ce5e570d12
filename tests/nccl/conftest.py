"""What the tests of groups over NCCL share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import standin

import hpcdist as dist
from hpcdist.backends.nccl import device


@pytest.fixture(scope="module")
def runtime() -> Iterator[standin.Runtime]:
    """The stand-ins for NCCL, and for CUDA's streams and events, in place."""
    standin.load()
    made = standin.Runtime()
    device.use(made)
    yield made
    if dist.is_initialized():
        dist.destroy_process_group()
    device.use(None)
