"""The one place that knows of CUDA: streams, events and memory, all from torch.

A runtime is an object with the methods of :class:`Cuda`. Tests put another one in its place with
:func:`use`, whose streams are threads.
"""

from __future__ import annotations

import ctypes
from typing import Any

from hpcdist.errors import DistBackendError

__all__ = ["Cuda", "runtime", "use"]

_chosen: Any = None


class Cuda:
    """torch's CUDA streams and events, and the driver's word on whether an event is reached."""

    #: DLPack's number of the kind of memory.
    memory = 2
    #: What the memory is called in messages.
    name = "cuda"

    def __init__(self) -> None:
        import torch

        if not torch.cuda.is_available():
            raise DistBackendError(
                "the backend 'nccl' is not available: it needs a GPU that torch can use, and "
                "torch.cuda.is_available() is False; python -m hpcdist diagnose says more"
            )
        self._cuda = torch.cuda
        self._torch = torch
        try:
            driver = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise DistBackendError(f"the CUDA driver's library cannot be loaded: {error}") from None
        #: Address of ``int query(event)``: 0 when reached, 600 before.
        self.query: int = ctypes.cast(driver.cuEventQuery, ctypes.c_void_p).value or 0

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
        event = self._cuda.Event()
        event.record(stream)
        return event

    def event_handle(self, event: Any) -> int:
        """The cudaEvent_t."""
        return int(event.cuda_event)

    def order(self, stream: Any, event: Any) -> None:
        """Let a stream wait for an event; the caller does not."""
        stream.wait_event(event)

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


def use(other: Any) -> None:
    """Put another runtime in its place; None: torch's CUDA again."""
    global _chosen
    _chosen = other
