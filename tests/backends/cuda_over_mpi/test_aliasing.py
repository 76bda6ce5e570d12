"""CUDA tensors over MPI that share memory: as on the host, the right numbers or a refusal."""

from __future__ import annotations

import aliasing
import cases
import pytest
from device_aliasing import check_all
from over_mpi import CHUNK

pytestmark = [pytest.mark.standin, pytest.mark.usefixtures("over_mpi")]

#: Elements of a block: in one buffer of pinned memory, and in several.
SIZES = (6, CHUNK // 8 + 30)


def refused(name, case, rank, size):
    """An input in another one's place is copied on the device, and refused on the host."""
    rule = name.replace("all_gather_coalesced", "all_gather")
    return aliasing.refused(rule, case, rank, size)


@pytest.mark.parametrize("n", SIZES)
def test_every_operation_with_every_overlap(n, count):
    check = cases.Check()
    count(check_all(check, n, refused, mixed=True))
    check.done()
