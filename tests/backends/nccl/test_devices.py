"""On which device groups over NCCL run."""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from standin import gpu

import hpcdist as dist
from hpcdist import _engine, _nccl
from hpcdist.backends.nccl.channel import Channel, MpiChannel, StoreChannel
from hpcdist.backends.nccl.communicators import Communicators
from hpcdist.backends.nccl.options import NCCLOptions
from hpcdist.testing import parallel_assert, parallel_raises
from hpcdist.torch.process_group import BridgeGroup

pytestmark = [pytest.mark.standin, pytest.mark.usefixtures("runtime", "_process_group")]


def start(**arguments: int) -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("nccl", timeout=timedelta(seconds=20), **arguments)


@pytest.fixture
def found(runtime, monkeypatch) -> list[int]:
    """The devices to which arrays of the host are copied, in order."""
    devices: list[int] = []

    def upload(array: object, index: int) -> torch.Tensor:
        devices.append(index)
        return gpu(torch.as_tensor(array))

    monkeypatch.setattr(runtime, "upload", upload, raising=False)
    return devices


def test_devices_of_what_has_no_tensor(found):
    """The one that is named, else the group's, else the current one."""
    start()
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


@pytest.mark.parametrize("module", [dist, torch.distributed], ids=["own", "torch's"])
def test_devices_of_a_barriers_options(found, module):
    """The bridge's groups get them from torch.distributed.barrier."""
    start()
    plain, listed, other = (module.BarrierOptions() for _ in range(3))
    listed.device_ids = [3]
    other.device = torch.device("cuda", 2)
    for group in (dist.group.WORLD, BridgeGroup(dist.group.WORLD)):
        for options in (plain, listed, other):
            group.barrier(options).wait()
    parallel_assert(found == [0, 3, 2] * 2, f"{found}")


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


def pairs(channel: Channel, monkeypatch) -> Communicators:
    """Whose communicators are their identities, which differ."""
    made = Communicators(channel, NCCLOptions(), None, "pairs", 0.5)  # type: ignore[arg-type]
    monkeypatch.setattr(made, "_join", lambda index, unique, size, rank: unique[0])
    numbers = itertools.count(1)
    monkeypatch.setattr(_nccl, "unique_id", lambda: bytes([next(numbers)]))
    return made


@pytest.mark.mpi(min_size=2)
def test_a_pair_meets_after_one_of_the_two_was_late(monkeypatch):
    """It leaves no receive behind that takes another message, and keeps its identity."""
    comm = _engine.Comm.world("pairs", 20.0, 1)
    for first in (0, 1, 0):
        made, peer = pairs(MpiChannel(comm, False), monkeypatch), 1 - comm.rank
        if comm.rank == first:
            with pytest.raises(dist.DistTimeoutError):
                made.connect_pair(0, peer)
        comm.barrier()
        received, found = np.full(136, 7, np.uint8), [1, 2]
        if comm.rank == first:
            received[:] = 0
            comm.recv(received, peer, 1023)
        elif comm.rank < 2:
            comm.send(received, peer, 1023)
        made.timeout = 10.0
        if comm.rank < 2:
            found = [made.connect_pair(index, peer)[0] for index in (0, 1)]
        parallel_assert(found == [1, 2] and set(received) == {7}, f"{found}, {received}")
    comm.free()


def test_a_pair_meets_over_a_store_after_one_of_the_two_was_late(monkeypatch):
    for first in (0, 1):
        store = dist.HashStore()
        made = [pairs(StoreChannel(store, rank, 2), monkeypatch) for rank in (0, 1)]
        with parallel_raises(dist.DistTimeoutError, match=f"rank {1 - first} did not arrive"):
            made[first].connect_pair(0, 1 - first)
        with ThreadPoolExecutor(2) as threads:
            for index, unique in enumerate((b"\x01", b"\x02")):
                calls = [threads.submit(made[i].connect_pair, index, 1 - i) for i in (0, 1)]
                found = [call.result().rstrip(b"\0") for call in calls]
                parallel_assert(found == [unique] * 2, f"{found}")


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
