"""The stand-in for libnccl.so.2 and for streams and events, of ``tests/standin/*.c``.

It has NCCL's functions over host memory, between processes of one machine. A stream is a thread
with a queue, so work that was not waited for is really not done.
"""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import functools
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from standin_library import build, library, load

__all__ = [
    "Event", "FakeCuda", "Graph", "Runtime", "Stream", "build", "cpu", "fault", "gpu", "library",
    "load", "misuses", "on", "slow_aborts", "slow_calls", "to_gpu", "training",
]  # fmt: skip


class Stream:
    """A stream; `handle` 0 is the default one."""

    def __init__(self, handle: int | None = None) -> None:
        self.handle = library().standin_stream_create() if handle is None else handle

    def synchronize(self) -> None:
        """Wait for everything that is in it."""
        library().standin_stream_synchronize(self.handle)

    def kernel(self, seconds: float, to: int = 0, source: int = 0, nbytes: int = 0, value: int = 0):
        """What a kernel would do: after some time fill or copy memory."""
        library().standin_kernel(self.handle, to, source, nbytes, value, seconds)


class Event:
    """An event that has been recorded."""

    def __init__(self, stream: Stream) -> None:
        made = ctypes.c_void_p()
        library().standin_event_create(ctypes.byref(made), 0)
        self.handle = made.value
        library().standin_event_record(self.handle, stream.handle)

    def __del__(self) -> None:
        library().standin_event_destroy(self.handle)


class Factories(torch.overrides.TorchFunctionMode):
    """Inside of it new tensors can be made on, and moved to, the stand-in's GPU."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        named = kwargs.get("device")
        back = function is torch.Tensor.cpu or (
            function is torch.Tensor.to and len(args) > 1 and str(args[1]) == "cpu"
        )
        if back and isinstance(args[0], FakeCuda):
            return cpu(args[0])
        moved = function is torch.Tensor.to and len(args) > 1 and _is_gpu(args[1])
        if moved:
            args = (args[0], "cpu", *args[2:])
        elif _is_gpu(named):
            kwargs["device"] = "cpu"
        else:
            return function(*args, **kwargs)
        made = function(*args, **kwargs)
        return made if isinstance(made, FakeCuda) else made.as_subclass(FakeCuda)


def _hook(function: Any) -> Any:
    """What autograd calls, with the stand-in's GPU in its sight: autograd switches modes off."""

    @functools.wraps(function)
    def inside(*args: Any, **kwargs: Any) -> Any:
        with torch._C._EnableTorchFunction(), Factories():
            return function(*args, **kwargs)

    return inside


#: What starts operations: any of them by Python's way, and those that are native as a whole.
_LAUNCHES = (
    ("StreamQueue", ("launch",)),
    ("SingleCalls", ("all_reduce", "broadcast", "all_gather_into_tensor", "reduce_scatter_tensor")),
)


def _in_step(native: type, names: tuple[str, ...]) -> type:
    """A class whose synchronous operations let the host catch up with its stream."""

    def follow(name: str) -> Any:
        function = getattr(native, name)

        @functools.wraps(function)
        def inside(self: Any, *args: Any, **kwargs: Any) -> Any:
            work = function(self, *args, **kwargs)
            if work is None:
                runtime = getattr(self, "queue", self).runtime
                runtime.follow(runtime.current(0))
            return work

        return inside

    return type(native.__name__, (native,), {name: follow(name) for name in names})


@contextlib.contextmanager
def training() -> Iterator[None]:
    """Let modules be trained on the stand-in's GPU, in groups made in it and in lockstep."""
    from hpcdist.backends.nccl import group
    from hpcdist.parallel.reducer.reducer import Reducer

    changed = (
        *(
            (group, name, _in_step(getattr(group, name), operations))
            for name, operations in _LAUNCHES
        ),
        (Reducer, "_on_gradient", _hook(Reducer._on_gradient)),
        (Reducer, "end_of_backward", _hook(Reducer.end_of_backward)),
    )
    before = [getattr(owner, name) for owner, name, _ in changed]
    for owner, name, other in changed:
        setattr(owner, name, other)
    try:
        with Factories():
            yield
    finally:
        for (owner, name, _), function in zip(changed, before, strict=True):
            setattr(owner, name, function)


def _is_gpu(device: Any) -> bool:
    return str(device).startswith("cuda") if isinstance(device, (str, torch.device)) else False


class FakeCuda(torch.Tensor):
    """A tensor of host memory that says it is on a GPU."""

    @property
    def device(self) -> torch.device:
        """Not where it is."""
        return torch.device("cuda", 0)


def gpu(tensor: torch.Tensor) -> FakeCuda:
    """A copy on the stand-in's GPU."""
    return tensor.detach().clone().as_subclass(FakeCuda)


def to_gpu(module: torch.nn.Module) -> torch.nn.Module:
    """Move a module to the stand-in's GPU; autograd makes its gradients as ordinary tensors."""
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None:
                owner._parameters[name] = torch.nn.Parameter(
                    gpu(parameter), requires_grad=parameter.requires_grad
                )
        for name, buffer in owner._buffers.items():
            if buffer is not None:
                owner._buffers[name] = gpu(buffer)
    return module


def cpu(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of what is there when the current stream is done."""
    Runtime.current(0).synchronize()
    return tensor.detach().as_subclass(torch.Tensor).clone()


_current: contextvars.ContextVar[int] = contextvars.ContextVar("current stream")


class Runtime:
    """In the place of ``hpcdist.backends.cuda.Cuda``.

    Parameters
    ----------
    lockstep : bool
        With :func:`training`, let the host stay in step with the current stream, because torch's
        own operations on the stand-in's tensors run on the host at once: what would be enqueued
        behind an operation on the current stream, or behind one that stream was told to wait for,
        finds it done. What nobody waited for is still not there.
    """

    memory = 1  # DLPack's number of host memory
    name = "cuda"
    orderly = False
    _local = threading.local()
    #: Handle of a device's current stream, in this thread. None chosen: the index itself, which is
    #: 0 as the default stream's handle. Costs what torch's own function does.
    raw = staticmethod(_current.get)
    #: Seconds that a copy takes beside its own: so long it is not done for whoever does not wait.
    lag = 0.0
    #: Most bytes of pinned memory that were there at once, and what is there now.
    most = there = 0

    def __init__(self, lockstep: bool = False) -> None:
        self._lockstep = lockstep
        self.functions = {
            name: ctypes.cast(getattr(library(), f"standin_{symbol}"), ctypes.c_void_p).value
            for name, symbol in (
                ("create", "event_create"),
                ("record", "event_record"),
                ("query", "event_query"),
                ("wait", "stream_wait_lockstep" if lockstep else "stream_wait_event"),
                ("captures", "stream_captures"),
                ("mode", "thread_mode"),
            )
        }
        self._touched: deque[tuple[Any, ...]] = deque()
        self._pins: dict[int, tuple[int, int]] = {}
        self._pinned = 0
        self._lock = threading.Lock()

    def context(self, index: int) -> int:
        return 0

    def index(self) -> int:
        return 0

    def enter(self, index: int) -> None:
        pass

    @classmethod
    def current(cls, index: int) -> Stream:
        return getattr(cls._local, "stream", None) or Stream(0)

    def stream(self, index: int, high_priority: bool) -> Stream:
        return Stream()

    def handle(self, stream: Stream) -> int:
        return stream.handle

    def record(self, stream: Stream) -> Event:
        return Event(stream)

    def order(self, stream: Stream, event: Event) -> None:
        library().standin_stream_wait_event(stream.handle, event.handle, 0)
        self.follow(stream)

    def follow(self, stream: Stream) -> None:
        """In lockstep, wait until the current stream is done."""
        if self._lockstep and stream.handle == self.current(0).handle:
            stream.synchronize()

    def reach(self, event: Event) -> None:
        while not self.reached(event):
            time.sleep(2e-5)

    def reached(self, event: Event) -> bool:
        return library().standin_event_query(event.handle) == 0

    def pinned(self, size: int) -> torch.Tensor:
        made = torch.full((size,), 0xA5, dtype=torch.uint8)  # what nobody wrote shows
        self.there += size
        self.most = max(self.most, self.there)
        self._pinned += 1
        self._pins[self._pinned] = made.data_ptr(), size
        weakref.finalize(made, self._unpin, self._pinned)
        return made

    def _unpin(self, number: int) -> None:
        self.there -= self._pins.pop(number)[1]

    def _is_pinned(self, tensor: torch.Tensor) -> bool:
        at = tensor.data_ptr()
        return any(pin <= at < pin + size for pin, size in list(self._pins.values()))

    def copy(self, stream: Stream, to: torch.Tensor, source: torch.Tensor) -> None:
        # not by their classes: where C++ calls Python, parts of subclasses are plain tensors
        assert self._is_pinned(to) != self._is_pinned(source)
        assert to.nbytes == source.nbytes and to.is_contiguous() and source.is_contiguous()
        stream.kernel(self.lag, to.data_ptr(), source.data_ptr(), to.nbytes)
        # a device's memory is given away in the order of streams, the host's is not
        with self._lock:  # messages are copied by threads of their own
            self._touched.append((Event(stream), to, source))
            while self._touched and self.reached(self._touched[0][0]):
                self._touched.popleft()

    def duplicate(self, stream: Stream, tensor: torch.Tensor) -> torch.Tensor:
        made = torch.full_like(tensor, 0xA5)
        stream.kernel(self.lag, made.data_ptr(), tensor.data_ptr(), tensor.nbytes)
        with self._lock:
            self._touched.append((Event(stream), made, tensor))
        return made

    def divide(self, stream: Stream, tensor: torch.Tensor, by: int) -> None:
        stream.synchronize()
        tensor.as_subclass(torch.Tensor).div_(by)

    def capturing(self) -> bool:
        status = ctypes.c_int()
        library().standin_stream_captures(self.raw(0), ctypes.byref(status))
        return bool(status.value)

    def promise(self, index: int) -> Any:
        return torch.futures.Future()

    def upload(self, array: Any, index: int) -> FakeCuda:
        return gpu(torch.as_tensor(array))

    def download(self, tensor: FakeCuda, array: Any) -> None:
        array[...] = cpu(tensor).numpy()

    def future(self, index: int, stream: Stream, result: Any) -> Any:
        made = torch.futures.Future()
        stream.synchronize()
        made.set_result(result)
        return made


@contextlib.contextmanager
def on(stream: Stream) -> Iterator[None]:
    """Make a stream the current one of this thread."""
    _choose(stream)
    try:
        yield
    finally:
        _choose(None)


def _choose(stream: Stream | None) -> None:
    Runtime._local.stream = stream
    _current.set(stream.handle if stream else 0)
    library().standin_stream_choose(_current.get())


class Graph:
    """What was captured on a stream; as a context it captures."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._handle: int | None = None
        #: CUDA's error that the capture ended with; 0 is none.
        self.error = 0

    def __enter__(self) -> Graph:
        _choose(self._stream)
        library().standin_capture_begin(self._stream.handle)
        return self

    def __exit__(self, *rest: object) -> None:
        error = ctypes.c_int()
        self._handle = library().standin_capture_end(self._stream.handle, ctypes.byref(error))
        self.error = error.value
        _choose(None)

    def replay(self) -> None:
        """Enqueue all of it on the stream."""
        library().standin_replay(self._handle, self._stream.handle)


@contextlib.contextmanager
def slow_calls(seconds: float) -> Iterator[None]:
    """Let every call of a communicator take so long, so that other threads come in its way."""
    library().standin_slow(seconds)
    try:
        yield
    finally:
        library().standin_slow(0.0)


@contextlib.contextmanager
def slow_aborts() -> Iterator[None]:
    """Let an abort wait for what is in flight on all communicators of this process."""
    library().standin_abort_waits(1)
    try:
        yield
    finally:
        library().standin_abort_waits(0)


def misuses() -> int:
    """How often a communicator was used after it was freed, or freed while a call was inside."""
    return library().standin_misuses()


@contextlib.contextmanager
def fault(text: str) -> Iterator[None]:
    """Let an operation go wrong: ``kind:rank:number[:seconds]``, see tests/standin/README.md."""
    os.environ["NCCL_STANDIN_FAULT"] = text
    try:
        yield
    finally:
        del os.environ["NCCL_STANDIN_FAULT"]
