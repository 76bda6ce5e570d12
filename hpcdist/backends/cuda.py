"""The only access to CUDA: streams, events and memory, all from torch.

A runtime is an object with the methods of :class:`Cuda`. Tests replace it by one whose streams are
threads, with :func:`use`.
"""

from __future__ import annotations

import ctypes
import os
import sys
from typing import Any

from hpcdist.errors import DistBackendError
from hpcdist.hardware import gpu_of

_chosen: Any = None

#: Functions of the driver. The runtime's cudaStream_t and cudaEvent_t are the driver's handles.
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

    #: DLPack's device type.
    memory = 2
    #: Name of the memory in messages.
    name = "cuda"
    #: Whether memory that is freed is not used again before what is in its stream is done.
    orderly = True

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
        #: Addresses of the functions that start and watch an operation: see hd_cuda in
        #: ``hd_nccl_watch.h``.
        self.functions: dict[str, int] = {
            name: ctypes.cast(getattr(driver, symbol), ctypes.c_void_p).value or 0
            for name, symbol in _SYMBOLS.items()
        }
        #: Returns the handle of the calling thread's current stream on the device of an index.
        self.raw: Any = torch._C._cuda_getCurrentRawStream

    def context(self, index: int) -> int:
        """Return the CUcontext that torch uses for a device; it lives until the process ends."""
        number, made = ctypes.c_int(), ctypes.c_void_p()
        code = self._driver.cuDeviceGet(ctypes.byref(number), index)
        code = code or self._driver.cuDevicePrimaryCtxRetain(ctypes.byref(made), number)
        if code:
            raise DistBackendError(f"CUDA does not give the context of GPU {index}: error {code}")
        return made.value or 0

    def index(self) -> int:
        """Return the calling thread's device."""
        return int(self._cuda.current_device())

    def enter(self, index: int) -> None:
        """Set the calling thread's device."""
        self._cuda.set_device(index)

    def current(self, index: int) -> Any:
        """Return the caller's current stream on a device."""
        return self._cuda.current_stream(index)

    def stream(self, index: int, high_priority: bool) -> Any:
        """Create a stream."""
        return self._cuda.Stream(index, priority=-1 if high_priority else 0)

    def handle(self, stream: Any) -> int:
        """Return the cudaStream_t."""
        return int(stream.cuda_stream)

    def record(self, stream: Any) -> Any:
        """Record an event that is reached when all work now in the stream is done."""
        event = self._cuda.Event(blocking=True)  # a host thread that waits for it yields its core
        event.record(stream)
        return event

    def order(self, stream: Any, event: Any) -> None:
        """Let a stream wait for an event; the caller does not wait."""
        stream.wait_event(event)

    def reach(self, event: Any) -> None:
        """Block the calling thread until an event is reached; other threads continue."""
        event.synchronize()

    def reached(self, event: Any) -> bool:
        """Return whether an event has been reached."""
        return bool(event.query())

    def pinned(self, size: int) -> Any:
        """Allocate bytes of pinned host memory, which the device copies from and to by itself."""
        torch = self._torch
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)

    def copy(self, stream: Any, to: Any, source: Any) -> None:
        """Copy bytes between the device and pinned memory, in stream order."""
        with self._cuda.stream(stream):
            to.copy_(source, non_blocking=True)

    def duplicate(self, stream: Any, tensor: Any) -> Any:
        """A copy of a tensor on its device, in stream order."""
        with self._cuda.stream(stream):
            return tensor.clone()

    def divide(self, stream: Any, tensor: Any, by: int) -> None:
        """Divide a tensor in place, in stream order."""
        with self._cuda.stream(stream):
            tensor.div_(by)

    def capturing(self) -> bool:
        """Whether a CUDA graph captures what the caller enqueues now."""
        return bool(self._cuda.is_current_stream_capturing())

    def promise(self, index: int) -> Any:
        """Return a future for tensors of a device."""
        return self._torch.futures.Future(devices=[f"cuda:{index}"])

    def upload(self, array: Any, index: int) -> Any:
        """Copy host memory to a new tensor on the device."""
        return self._torch.as_tensor(array).to(f"cuda:{index}")

    def download(self, tensor: Any, array: Any) -> None:
        """Copy a device tensor into host memory; waits for the current stream."""
        array[...] = tensor.cpu().numpy()

    def future(self, index: int, stream: Any, result: Any) -> Any:
        """Return a future whose waiters' streams wait for the work now in the stream."""
        made: Any = self._torch.futures.Future(devices=[f"cuda:{index}"])
        with self._cuda.stream(stream):
            made.set_result(result)
        return made


def runtime() -> Any:
    """Return the runtime of this process; the first call makes it."""
    global _chosen
    if _chosen is None:
        _chosen = Cuda()
    return _chosen


def present() -> bool:
    """Whether this program can have tensors on a GPU; asking imports nothing.

    Returns
    -------
    bool
        As torch says, if it has been imported; without torch there is no tensor on a GPU.
    """
    torch = sys.modules.get("torch")
    return _chosen is not None or (torch is not None and torch.cuda.is_available())


def may_come() -> bool:
    """Whether there may be tensors on a GPU, now or after torch is imported."""
    if "torch" in sys.modules or _chosen is not None:
        return present()
    return os.path.exists("/proc/driver/nvidia/version")


def choose(local_rank: int, named: int | None) -> None:
    """Make a GPU the calling thread's current device, unless the program has chosen one.

    Parameters
    ----------
    local_rank : int
        Place of the rank among those of its node, whose ranks take turns.
    named : int or None
        Index of the GPU that init_process_group was told, which goes first.
    """
    try:
        import torch
    except ImportError:
        return
    count = torch.cuda.device_count()
    if count and not torch.cuda.is_initialized():  # torch's set_device initializes CUDA
        torch.cuda.set_device(gpu_of(local_rank, count) if named is None else named)
    elif count and named and torch.cuda.current_device() == 0:
        torch.cuda.set_device(named)  # its communicator was made, in a thread with this device


def use(other: Any) -> None:
    """Replace the runtime; None restores torch's CUDA."""
    global _chosen
    _chosen = other


def device_index(device_id: Any) -> int | None:
    """Return the index of a GPU.

    Parameters
    ----------
    device_id : int, str, torch.device or None
        Its index, its name (``"cuda:1"``), or a device; without an index the first GPU.

    Returns
    -------
    int or None
        None if it is not a GPU.
    """
    if device_id is None or isinstance(device_id, int):
        return device_id
    kind, _, number = str(device_id).partition(":")  # str(torch.device) has the same form
    return int(number or 0) if kind == "cuda" else None
