"""Runs the suite's tests for GPUs on CPU tensors.

Most of them need a GPU only because the suite's backends did once: they test DDP, hooks, averagers.
The suite sees a ``torch.cuda`` with a device per rank, and whatever it puts there stays on the CPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

__all__ = ["OnCpu", "pretend"]

_CPU = torch.device("cpu")


def _elsewhere(device: Any) -> bool:
    """Whether an argument means a GPU."""
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return type(device) is int or (isinstance(device, str) and device.startswith("cuda"))


class OnCpu(TorchFunctionMode):
    """Keeps tensors on the CPU that a test makes for a GPU or moves there."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is torch.Tensor.cuda:
            return args[0]
        if _elsewhere(kwargs.get("device")):
            kwargs = {**kwargs, "device": _CPU}
        if function is torch.Tensor.to and len(args) > 1 and _elsewhere(args[1]):
            args = (args[0], _CPU, *args[2:])
        return function(*args, **kwargs)


class _Stream:
    """A stream that does everything at once."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.device = _CPU

    def wait_stream(self, other: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass


class _Cuda(ModuleType):
    """torch.cuda on a machine with a GPU per rank."""

    Stream = _Stream

    def __init__(self, ranks: int) -> None:
        super().__init__("torch.cuda")
        self._ranks = ranks
        self._current = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return self._ranks

    def set_device(self, device: Any) -> None:
        self._current = torch.device("cuda", device).index if type(device) is int else 0

    def current_device(self) -> int:
        return self._current

    def synchronize(self, device: Any = None) -> None:
        pass

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    @contextlib.contextmanager
    def device(self, device: Any) -> Iterator[None]:
        yield

    @contextlib.contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        yield


class _Accelerator(ModuleType):
    """torch.accelerator with the same devices: from 2.15 on the suite asks it."""

    def __init__(self, cuda: _Cuda) -> None:
        super().__init__("torch.accelerator")
        self.is_available = cuda.is_available
        self.device_count = cuda.device_count
        self.set_device_index = cuda.set_device
        self.current_device_index = cuda.current_device
        self.synchronize = cuda.synchronize

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.accelerator, name)

    def current_accelerator(self, check_available: bool = False) -> torch.device:
        return torch.device("cuda")


class _IsDevice(type):
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, torch.device)


class _Device(metaclass=_IsDevice):
    """torch.device, which takes no number where there is no GPU."""

    def __new__(cls, device: Any, *args: Any) -> Any:
        return torch.device("cuda", device) if type(device) is int else torch.device(device, *args)


class _Torch(ModuleType):
    """torch with that torch.cuda and torch.accelerator."""

    device = _Device

    def __init__(self, ranks: int) -> None:
        super().__init__("torch")
        self.cuda = _Cuda(ranks)
        self.accelerator = _Accelerator(self.cuda)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _to(self: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
    if args and _elsewhere(args[0]):
        args = (_CPU, *args[1:])
    if _elsewhere(kwargs.get("device")):
        kwargs["device"] = _CPU
    return _module_to(self, *args, **kwargs)


_module_to = torch.nn.Module.to


def _without_devices(construct: Callable[..., None]) -> Callable[..., None]:
    def __init__(self: Any, module: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        for name in ("device_ids", "output_device"):
            kwargs.pop(name, None)
        construct(self, module, *(None for _ in args[:2]), *args[2:], **kwargs)

    return __init__


def pretend(common: ModuleType, ranks: int) -> Callable[[ModuleType, type], None]:
    """Prepare the suite's helpers before the suite is imported.

    Parameters
    ----------
    common : module
        ``torch.testing._internal.common_distributed``.
    ranks : int
        Number of ranks, and of the GPUs that the suite sees.

    Returns
    -------
    callable
        For the suite and the class of DDP that it uses, once they are there.
    """
    fake = _Torch(ranks)
    torch.nn.Module.to = _to  # type: ignore[method-assign, assignment]
    torch.cuda.set_device = fake.cuda.set_device  # torch's DeviceMesh chooses LOCAL_RANK's
    common.torch = fake  # type: ignore[attr-defined]
    common.TEST_CUDA = True  # type: ignore[attr-defined]

    def into(suite: ModuleType, ddp: type) -> None:
        suite.torch = fake  # type: ignore[attr-defined]
        ddp.__init__ = _without_devices(ddp.__init__)  # type: ignore[misc]

    return into
