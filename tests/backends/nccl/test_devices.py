"""On which device groups over NCCL run."""

from __future__ import annotations

import threading
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from standin import gpu

import hpcdist as dist
from hpcdist import _nccl
from hpcdist.backends.nccl.communicators import Communicators
from hpcdist.backends.nccl.options import NCCLOptions
from hpcdist.testing import parallel_assert, parallel_raises

pytestmark = [pytest.mark.standin, pytest.mark.usefixtures("runtime", "_process_group")]


def start(**arguments: int) -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("nccl", timeout=timedelta(seconds=20), **arguments)


def test_devices_of_what_has_no_tensor(runtime, monkeypatch):
    """The one that is named, else the group's, else the current one."""
    start()
    found: list[int] = []

    def upload(array: object, index: int) -> torch.Tensor:
        found.append(index)
        return gpu(torch.as_tensor(array))

    monkeypatch.setattr(runtime, "upload", upload, raising=False)
    dist.barrier()
    dist.barrier(device_ids=[3])
    dist.barrier(device_ids=[])
    dist.barrier(device_ids=[3], timeout=timedelta(seconds=5))
    parallel_assert(found == [0, 3, 0, 3], f"{found}")
    start(device_id=2)
    parallel_assert(dist.groups.world.world.device == 2)  # for a mesh
    found.clear()
    dist.barrier()
    dist.barrier(device_ids=[3])
    dist.barrier(dist.new_group(list(range(dist.get_world_size()))))
    parallel_assert(found == [2, 3, 2], f"{found}")


def test_pairs_of_each_device(monkeypatch):
    """Messages of tensors on two devices have a communicator on each."""

    class Channel:
        rank, size = 0, 2

        def agree_with(self, peer: int, number: int, unique: bytes, timeout: float) -> bytes:
            return bytes([number])

    made = Communicators(Channel(), NCCLOptions(), None, "pairs", 5.0)
    monkeypatch.setattr(made, "_join", lambda index, unique, size, rank: (index, unique[0]))
    monkeypatch.setattr(_nccl, "unique_id", bytes)
    found = [made.connect_pair(index, 1) for index in (0, 1, 0, 1)]
    wanted = [(0, b"\x01"), (1, b"\x02")]
    parallel_assert(found == wanted * 2, f"{found}")


@pytest.mark.parametrize("blocking", [True, False])
def test_the_callers_device_stays(monkeypatch, blocking):
    entered = threading.local()

    class Devices:
        def index(self) -> int:
            return getattr(entered, "index", 0)

        def enter(self, index: int) -> None:
            entered.index = index

    class Channel:
        rank, size = 0, 1

        def agree(self, number: int, unique: bytes, *about: object) -> list[bytes]:
            return [unique]

    def init(*about: object) -> None:
        found.append(devices.index())
        raise dist.DistBackendError("no communicator")

    devices, found = Devices(), []
    chosen = NCCLOptions(blocking=blocking)
    made = Communicators(Channel(), chosen, devices, "devices", 5.0)  # type: ignore[arg-type]
    monkeypatch.setattr(_nccl, "unique_id", bytes)
    stub = SimpleNamespace(init=init)
    monkeypatch.setattr("hpcdist.backends.nccl.communicators.Communicator", stub)
    with parallel_raises(dist.DistBackendError, match="no communicator"):
        made.connect(3)
    parallel_assert(found == [3] and devices.index() == 0, f"{found}, {devices.index()}")
