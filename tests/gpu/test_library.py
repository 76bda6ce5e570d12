"""The real libnccl.so.2, which this machine has to have; a GPU is not needed."""

from __future__ import annotations

from pathlib import Path

import pytest

import hpcdist
from hpcdist import _nccl, _nccl_loader

pytestmark = pytest.mark.by_hand


def test_version_identity_and_what_it_says_without_a_gpu():
    found = _nccl_loader.load()
    unique = _nccl.unique_id()
    assert found.version >= 21800
    assert len(unique) == 128
    assert unique != _nccl.unique_id()
    assert "comm_register" in found.optional or found.version < 21900
    if Path("/proc/driver/nvidia/version").exists():
        comm = _nccl.Communicator.init(unique, 1, 0)
        assert (comm.rank, comm.size) == (0, 1)
        comm.destroy()
        return
    with pytest.raises(hpcdist.DistBackendError, match=r"ncclUnhandledCudaError, 1.*driver"):
        _nccl.Communicator.init(unique, 1, 0)
