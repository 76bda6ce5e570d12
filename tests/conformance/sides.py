"""What PyTorch's suite is run over: the bridge, the native module, or gloo for comparison."""

from __future__ import annotations

import os
from datetime import timedelta
from types import ModuleType
from typing import Any

from words import native, ours

#: Tests that make the default group themselves, or compare the backend's name: over the bridge they
#: are told the true one.
BY_NAME = {
    "test_barrier_timeout_global",
    "test_ddp_update_process_group_default_group",
    "test_get_backend",
}


class Side:
    """One of them.

    Attributes
    ----------
    label : str
        What the suite is told that the backend is called: it decides what is tried.
    pretends : bool
        Whether the tests for GPUs run on CPU tensors (``on_cpu.py``).
    """

    label = "mpi"
    pretends = True

    def furnish(self, suite: ModuleType, common: ModuleType) -> None:
        """Put into the suite's modules what its tests are to use."""

    def expected(self, error: Any, text: Any = None) -> tuple[Any, Any]:
        """Give the error, and its text, to expect where the suite expects these."""
        return error, ours(text)

    def start(self, test: str, timeout: float) -> None:
        """Make the default group."""
        raise NotImplementedError

    def stop(self) -> None:
        """Destroy every group of torch's, where the test has not done so."""
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()


class Gloo(Side):
    """torch.distributed over gloo: the column to compare with."""

    label = "gloo"

    def expected(self, error: Any, text: Any = None) -> tuple[Any, Any]:
        return error, text

    def start(self, test: str, timeout: float) -> None:
        import hpcdist.torch

        hpcdist.torch.init_process_group("gloo", timeout=timedelta(seconds=timeout))


class Bridge(Gloo):
    """torch.distributed over the backend "hpcdist"."""

    label = "mpi"

    def expected(self, error: Any, text: Any = None) -> tuple[Any, Any]:
        return error, ours(text)

    def furnish(self, suite: ModuleType, common: ModuleType) -> None:
        import torch.distributed as dist

        import hpcdist
        import hpcdist.torch

        self.suite = suite
        for profiled in ("PROFILING", "CUDA_PROFILING", "SEND_RECV_PROFILING"):
            getattr(suite, f"{profiled}_SUPPORTED_BACKENDS").append("hpcdist")

        # torch gives its own to gloo's groups only
        def monitored_barrier(group: Any = None, timeout: Any = None, *args: Any, **kw: Any) -> Any:
            return hpcdist.monitored_barrier(hpcdist.torch.group(group), timeout, *args, **kw)

        dist.monitored_barrier = monitored_barrier

    def start(self, test: str, timeout: float) -> None:
        import hpcdist.torch

        self.suite.BACKEND = "hpcdist" if test in BY_NAME else self.label
        hpcdist.torch.init_process_group(timeout=timedelta(seconds=timeout))


class BridgeOnGpu(Bridge):
    """The bridge with CUDA tensors on a GPU: one rank, NCCL."""

    label = "nccl"
    pretends = False


class Nccl(Gloo):
    """torch's own NCCL on a GPU: what the bridge is compared with there."""

    label = "nccl"
    pretends = False

    def start(self, test: str, timeout: float) -> None:
        import torch.distributed as dist

        dist.init_process_group(
            "nccl",
            store=dist.HashStore(),
            rank=0,
            world_size=1,
            timeout=timedelta(seconds=timeout),
        )


class Native(Side):
    """hpcdist itself in place of torch.distributed, with its DDP, samplers and averagers."""

    def furnish(self, suite: ModuleType, common: ModuleType) -> None:
        from native import furnish

        # the suite sends objects of classes of its own
        os.environ["HPCDIST_ALLOW_PICKLE"] = "1"
        furnish(suite, common)

    def expected(self, error: Any, text: Any = None) -> tuple[Any, Any]:
        return native(error, text)

    def start(self, test: str, timeout: float) -> None:
        import hpcdist

        hpcdist.init_process_group("mpi", timeout=timedelta(seconds=timeout))

    def stop(self) -> None:
        import hpcdist

        if hpcdist.is_initialized():
            hpcdist.destroy_process_group()
        super().stop()  # a DeviceMesh of torch's makes a world of torch's


SIDES: dict[str, type[Side]] = {
    "bridge": Bridge,
    "native": Native,
    "gloo": Gloo,
    "bridge-gpu": BridgeOnGpu,
    "nccl": Nccl,
}
