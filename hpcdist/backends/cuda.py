"""The one place that knows of CUDA: streams, events and memory, all from torch.

A runtime is an object with the methods of :class:`Cuda`. Tests put another one in its place with
:func:`use`, whose streams are threads.
"""

from __future__ import annotations

import ctypes
import os
import sys
from typing import Any

from hpcdist.errors import DistBackendError

__all__ = ["Cuda", "device_index", "may_come", "present", "runtime", "use"]

_chosen: Any = None

#: Functions of the driver. What the runtime calls cudaStream_t and cudaEvent_t are its own.
_SYMBOLS = {
    "create": "cuEventCreate",
    "record": "cuEventRecord",
    "query": "cuEventQuery",
    "wait": "cuStreamWaitEvent",
    "captures": "cuStreamIsCapturing",
    "mode": "cuThreadExchangeStreamCaptureMode",
    "context": "cuCtxGetCurrent",
    "enter": "cuCtxSetCurrent",
}


class Cuda:
    """torch's CUDA streams, and the driver's functions for events."""

    #: DLPack's number of the kind of memory.
    memory = 2
    #: What the memory is called in messages.
    name = "cuda"

    def __init__(self) -> None:
        import torch

        if not torch.cuda.is_available():
            raise DistBackendError(
                "CUDA is not available: the backend 'nccl' and CUDA tensors over MPI need a GPU "
                "that torch can use, and torch.cuda.is_available() is False; python -m hpcdist "
                "diagnose says more"
            )
        self._cuda = torch.cuda
        self._torch = torch
        try:
            driver = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise DistBackendError(f"the CUDA driver's library cannot be loaded: {error}") from None
        self._driver = driver
        #: What starting and watching an operation needs, as addresses: see hd_cuda in
        #: ``hd_nccl_watch.h``.
        self.functions: dict[str, int] = {
            name: ctypes.cast(getattr(driver, symbol), ctypes.c_void_p).value or 0
            for name, symbol in _SYMBOLS.items()
        }
        #: The handle of the calling thread's current stream, of a device's index.
        self.raw: Any = torch._C._cuda_getCurrentRawStream

    def context(self, index: int) -> int:
        """The CUcontext of a device that torch uses; it is kept until the process ends."""
        number, made = ctypes.c_int(), ctypes.c_void_p()
        code = self._driver.cuDeviceGet(ctypes.byref(number), index)
        code = code or self._driver.cuDevicePrimaryCtxRetain(ctypes.byref(made), number)
        if code:
            raise DistBackendError(f"CUDA does not give the context of GPU {index}: error {code}")
        return made.value or 0

    def index(self) -> int:
        """The calling thread's device."""
        return int(self._cuda.current_device())

    def enter(self, index: int) -> None:
        """Make a device the calling thread's."""
        self._cuda.set_device(index)

    def current(self, index: int) -> Any:
        """The stream that the caller's operations on a device go to."""
        return self._cuda.current_stream(index)

    def stream(self, index: int, high_priority: bool) -> Any:
        """A stream of our own."""
        return self._cuda.Stream(index, priority=-1 if high_priority else 0)

    def handle(self, stream: Any) -> int:
        """The cudaStream_t."""
        return int(stream.cuda_stream)

    def record(self, stream: Any) -> Any:
        """An event that is reached when all that is in the stream now is done."""
        event = self._cuda.Event(blocking=True)  # who waits for it on the host gives up the core
        event.record(stream)
        return event

    def order(self, stream: Any, event: Any) -> None:
        """Let a stream wait for an event; the caller does not."""
        stream.wait_event(event)

    def reach(self, event: Any) -> None:
        """Wait here until an event is reached; other threads go on."""
        event.synchronize()

    def reached(self, event: Any) -> bool:
        """Say whether an event has been reached."""
        return bool(event.query())

    def pinned(self, size: int) -> Any:
        """So many bytes of host memory that the device copies from and to by itself."""
        torch = self._torch
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)

    def copy(self, stream: Any, to: Any, source: Any) -> None:
        """Copy bytes between the device and pinned memory, in a stream's order."""
        with self._cuda.stream(stream):
            to.copy_(source, non_blocking=True)

    def duplicate(self, stream: Any, tensor: Any) -> Any:
        """A copy of a tensor on its device, in a stream's order."""
        with self._cuda.stream(stream):
            return tensor.clone()

    def divide(self, stream: Any, tensor: Any, by: int) -> None:
        """Divide a tensor in place, in a stream's order."""
        with self._cuda.stream(stream):
            tensor.div_(by)

    def capturing(self) -> bool:
        """Whether what the caller enqueues now goes into a CUDA graph."""
        return bool(self._cuda.is_current_stream_capturing())

    def promise(self, index: int) -> Any:
        """A future for tensors of a device."""
        return self._torch.futures.Future(devices=[f"cuda:{index}"])

    def upload(self, array: Any, index: int) -> Any:
        """Host memory as a tensor on the device."""
        return self._torch.as_tensor(array).to(f"cuda:{index}")

    def download(self, tensor: Any, array: Any) -> None:
        """A tensor of the device into host memory; waits for the current stream."""
        array[...] = tensor.cpu().numpy()

    def future(self, index: int, stream: Any, result: Any) -> Any:
        """A future whose waiters' streams wait for what is in the stream now."""
        made: Any = self._torch.futures.Future(devices=[f"cuda:{index}"])
        with self._cuda.stream(stream):
            made.set_result(result)
        return made


def runtime() -> Any:
    """The runtime of this process, made at the first call."""
    global _chosen
    if _chosen is None:
        _chosen = Cuda()
    return _chosen


def present() -> bool:
    """Whether this program can have tensors on a GPU; asking imports nothing.

    Returns
    -------
    bool
        As torch says, where it has been imported; without torch nobody has a tensor on a GPU.
    """
    torch = sys.modules.get("torch")
    return _chosen is not None or (torch is not None and torch.cuda.is_available())


def may_come() -> bool:
    """Whether tensors on a GPU are here or may still come: torch is not imported yet."""
    if "torch" in sys.modules or _chosen is not None:
        return present()
    return os.path.exists("/proc/driver/nvidia/version")


def use(other: Any) -> None:
    """Put another runtime in its place; None: torch's CUDA again."""
    global _chosen
    _chosen = other


def device_index(device_id: Any) -> int | None:
    """Index of a GPU.

    Parameters
    ----------
    device_id : int, str, torch.device or None
        Its number, its name as text (``"cuda:1"``), or as a device; without a number the first.

    Returns
    -------
    int or None
        None where it is no GPU.
    """
    if device_id is None or isinstance(device_id, int):
        return device_id
    kind, _, number = str(device_id).partition(":")  # torch.device's text is the same
    return int(number or 0) if kind == "cuda" else None
