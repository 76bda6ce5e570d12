"""Shared by all operations of CUDA tensors over MPI: agreement, order, buffers and errors."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from hpcdist import _buffer, _engine, config
from hpcdist.backends import cuda
from hpcdist.backends.base import GroupBackend
from hpcdist.errors import (
    DistBackendError,
    DistError,
    DistMismatchError,
    DistTimeoutError,
    checked_async,
)

from . import aware
from .device_tensor import DeviceTensor
from .lane import StagedJob, StagedWork, StagingLane, StagingLanes, refuse_forked
from .pinned import Piece, PinnedPool, pipeline, wait_until_reached

#: Keeps the making of a communicator here apart from new_group's on another thread.
_TAG = 201
#: Bytes of a call's description that ranks exchange when they disagree.
_TEXT = 240
#: Seconds that the end of the program leaves to operations in flight; the engine waits as long.
_PATIENCE = 3.0

_alive: weakref.WeakSet[Core] = weakref.WeakSet()


def _leave() -> None:
    """atexit, before the engine's own: threads of Python's do not outlive Python."""
    until = time.monotonic() + _PATIENCE
    for group in list(_alive):
        group.drain(until)


class Plan(NamedTuple):
    """How an operation is done once all ranks have arrived.

    ``pieces`` is given the communicator of CUDA tensors and a buffer's size; it may speak with the
    other ranks first. ``direct`` is given the communicator and hands the tensors themselves to MPI;
    None where that is not possible.
    """

    pieces: Callable[[_engine.Comm, int], Sequence[Piece]]
    two_buffers: bool = False
    direct: Callable[[_engine.Comm], Any] | None = None


class Core(GroupBackend):
    """A group over MPI, for tensors on a device.

    Parameters
    ----------
    comm : hpcdist._engine.Comm
        The group's communicator. On it the ranks agree on each operation, in the order of their
        calls; the data go over a second one, which the first operation makes, so that they do not
        get between what host tensors do meanwhile.
    """

    def __init__(self, comm: _engine.Comm) -> None:
        self._comm = comm
        self._made: _engine.Comm | None = None
        self._age = 0
        self._wanted = 1
        self._lost: list[Any] = []
        self._freed = False
        self._held: deque[tuple[StagedJob, list[Any]]] = deque()
        self._lane = StagingLane("hpcdist-cuda")
        self._lanes = StagingLanes("hpcdist-cuda-p2p")
        self._pool: PinnedPool | None = None
        self._lock = threading.RLock()  # a signal handler may make an operation too
        self._pid = os.getpid()
        super().__init__(comm.rank, comm.size, comm.name, comm.timeout)
        if not len(_alive):
            atexit.unregister(_leave)
            atexit.register(_leave)
        _alive.add(self)

    @property
    def timeout(self) -> float:
        """Seconds after which a missing peer is an error, in this thread's call."""
        return _buffer.limit() or float(self._comm.timeout)

    @timeout.setter
    def timeout(self, value: float) -> None:
        self._comm.timeout = value
        if self._made is not None:
            self._made.timeout = value

    @property
    def check(self) -> int:
        """Level of the entry check, that of host tensors."""
        return self._comm.check

    @check.setter
    def check(self, value: int) -> None:
        self._comm.check = value

    @property
    def node_ranks(self) -> tuple[int, ...]:
        """Group ranks on this rank's node."""
        return tuple(self._comm.node_ranks)

    @property
    def agreed_on(self) -> Any:
        """The communicator of host tensors."""
        return self._comm

    # --- agreement ---------------------------------------------------------------------------

    def _agree(self, api: str, call: str, direct: bool, asynchronous: bool) -> Callable[[], int]:
        """Compare a call with the other ranks'; in the order of calls, also if it runs later.

        Returns what waits for the comparison and gives the age of the communicator to use.
        """
        size = self._piece()
        call += ", by MPI itself" if direct else f", in pieces of {size} bytes"
        own = np.array([zlib.crc32(call.encode()), size, self._wanted], np.int64)
        table = np.empty((self.size, 3), np.int64)
        name = f"{api} ({cuda.runtime().name})"
        work = self._comm.all_gather_into_tensor(
            table.reshape(-1), own, _engine.ASYNC_HERE if asynchronous else False, api=name
        )

        def agreed() -> int:
            if work is not None:
                work.wait()
            age = int(table[:, 2].max())
            if (table[:, :2] != own[:2]).any():
                raise self._mismatch(api, call, age)
            return age

        return agreed

    def _mismatch(self, api: str, call: str, age: int) -> DistError:
        """All ranks have seen that they differ: now they show each other how."""
        own = np.zeros(_TEXT, np.uint8)
        text = call.encode()[:_TEXT]
        own[: len(text)] = np.frombuffer(text, np.uint8)
        texts = np.empty((self.size, _TEXT), np.uint8)
        comm = self._own(age, api)
        comm.all_gather_into_tensor(texts.reshape(-1), own, api=f"{api}: what differs")
        said = (bytes(row).rstrip(b"\0").decode("utf-8", "replace") for row in texts)
        calls = "\n".join(f"  rank {rank}: {each}" for rank, each in enumerate(said))
        return DistMismatchError(
            f"the ranks of group {self.name!r} called different operations on CUDA tensors; "
            f"nothing has been changed:\n{calls}"
        )

    def _own(self, age: int, api: str) -> _engine.Comm:
        """The communicator of CUDA tensors; after a failure all ranks make another."""
        if self._made is None or self._age < age:
            if self._made is not None:
                self._lost.append(self._made)  # there may be ranks still in it
                self._made = None
            name = f"{self.name} (cuda)" if age == 1 else f"{self.name} (cuda, {age})"
            try:
                made = self._comm.create_group(range(self.size), name, self.timeout, _TAG)
            except DistTimeoutError as error:
                raise DistTimeoutError(
                    f"{api} of CUDA tensors in group {self.name!r} on rank {self.rank}: the ranks "
                    f"agreed on it, and then not all came on: {error}"
                ) from None
            made.check = self._comm.check
            if aware.takes_device_memory():
                made.on_device = True
            self._made, self._age = made, age
        return self._made

    # --- operations --------------------------------------------------------------------------

    def _run(
        self,
        api: str,
        about: str,
        index: int,
        tensors: list[Any],
        outputs: list[Any],
        plan: Plan,
        asynchronous: Any,
    ) -> Any:
        """Do an operation of all ranks now, or later on the lane's thread.

        `about` is what must be the same in all ranks' calls, in words.
        """
        asynchronous = checked_async(asynchronous)
        self._ready(api, asynchronous)
        direct = plan.direct if aware.takes_device_memory() else None
        call = f"{api}({about})"
        runtime = cuda.runtime()
        current = runtime.current(index)
        stream = runtime.handle(current)
        if not asynchronous:  # before the ranks agree on what could not begin
            self._lane.refuse_in_handler(api)
        agreed = self._agree(api, call, direct is not None, asynchronous)
        ready: Any = None

        def run() -> Any:
            age = agreed()
            before = runtime.index()
            runtime.enter(index)
            try:
                comm = self._own(age, api)
                if direct is not None:
                    self._come_or_tell(comm, api, ready)  # MPI knows nothing of streams
                    return direct(comm)
                return self._piecewise(api, comm, index, stream, ready, plan)
            except BaseException as error:
                # the others may be elsewhere in the data: all take a new communicator next time
                self._wanted = age + 1
                refusal = error.refusal if isinstance(error, DistError) else None
                if refusal is None:
                    raise
                broken = DistBackendError(
                    f"{api} of CUDA tensors in group {self.name!r} on rank {self.rank} ended in "
                    f"the middle, because {refusal} could not go on: {refusal.reason}"
                )
                broken.refusal = refusal
                raise broken from error
            finally:
                runtime.enter(before)  # it may be the caller's thread

        self.seq += 1
        job = StagedJob(run, f"{api} (cuda) #{self.seq} of group {self.name!r} on rank {self.rank}")
        try:
            ready = runtime.record(current)
            self._begin(self._lane, job, tensors, asynchronous)
        except BaseException as error:
            if not job.taken:
                self._stay_away(api, agreed, error)
            raise
        if asynchronous:
            return StagedWork(runtime, index, stream, job, tensors, outputs, [])
        if job.event is not None:
            runtime.order(current, job.event)
        return None

    def _begin(
        self, lane: StagingLane, job: StagedJob, tensors: list[Any], asynchronous: bool
    ) -> None:
        """Give a job to a lane; its tensors are kept until it is over."""
        if not asynchronous:
            lane.call(job)
            return
        held = (job, tensors)
        self._held.append(held)
        try:
            lane.start(job)
        except BaseException:
            if not job.taken:
                with self._lock:
                    self._held.remove(held)
            raise

    def _stay_away(self, api: str, agreed: Callable[[], int], error: BaseException) -> None:
        """End the operation on the other ranks, which go on to data that this one has not begun."""
        with contextlib.suppress(DistError):
            age = agreed()
            self._wanted = age + 1
            self._lane.idle(time.monotonic() + self.timeout)  # earlier ones use the communicator
            self._tell(self._own(age, api), api, error)

    def _piecewise(
        self, api: str, comm: _engine.Comm, index: int, stream: int, ready: Any, plan: Plan
    ) -> Any:
        size = self._piece()

        def tell(error: BaseException) -> None:
            self._tell(comm, api, error)

        try:
            pieces = plan.pieces(comm, size)
            pool = self._buffers()
            pinned = pool.for_stream(index, stream, size)
        except BaseException as error:
            if not isinstance(error, DistError):  # that of MPI the others hear as well
                tell(error)
            raise
        try:
            return pipeline(pinned, ready, pieces, plan.two_buffers, self.timeout, tell)
        except BaseException as error:
            refused = isinstance(error, DistError) and error.refusal is not None
            if not refused and not isinstance(error, (DistMismatchError, DistTimeoutError)):
                pool.drop(pinned)  # else MPI has not had the buffers
            raise

    def _come_or_tell(self, comm: _engine.Comm, api: str, ready: Any) -> None:
        try:
            wait_until_reached(cuda.runtime(), ready, self.timeout)
        except BaseException as error:
            self._tell(comm, api, error)
            raise

    def _tell(self, comm: _engine.Comm, api: str, error: BaseException) -> None:
        """Signal the other ranks at once that this one cannot continue.

        Their next piece ends with its reason. The communicator is not used again.
        """
        with contextlib.suppress(DistError):
            comm.refuse(error, api=f"{api} (cuda)", begun=True)

    def _buffers(self) -> PinnedPool:
        with self._lock:
            if self._pool is None:
                self._pool = PinnedPool(cuda.runtime())
            return self._pool

    def _piece(self) -> int:
        """Bytes of a buffer: whole elements of every type, and some for each rank."""
        return int(max(config.get("cuda_chunk") // 16, self.size)) * 16

    @staticmethod
    def _device(api: str, parts: Sequence[DeviceTensor]) -> int:
        """The one device of all tensors."""
        indices = {part.device for part in parts}
        if len(indices) != 1:
            raise ValueError(
                f"{api}: all tensors must be on one device, and are on {sorted(indices)}"
            )
        return indices.pop()

    def _ready(self, api: str, asynchronous: bool) -> None:
        """Refuse invalid calls, and release finished operations."""
        refuse_forked(self._pid)
        if self._freed:
            raise DistBackendError(f"the group {self.name!r} has been destroyed")
        runtime = cuda.runtime()
        if runtime.capturing():
            raise DistBackendError(
                f"{api} over MPI cannot be captured into a CUDA graph, because the host takes part "
                "in it: use backend 'nccl', or call it outside the graph"
            )
        if asynchronous and _engine.thread_level() != "multiple":
            raise DistBackendError(
                f"{api} of a CUDA tensor without waiting needs MPI_THREAD_MULTIPLE, and MPI was "
                f"started with {_engine.thread_level()}: start it by hpcdist, or call it with "
                "async_op=False"
            )
        with self._lock:  # operations may come from several threads
            while self._held and self._ended(self._held[0][0]):
                self._held.popleft()

    @staticmethod
    def _ended(job: StagedJob) -> bool:
        if not job.done.is_set():
            return False
        return job.event is None or bool(cuda.runtime().reached(job.event))

    # --- the end -----------------------------------------------------------------------------

    def drain(self, until: float) -> bool:
        """Wait until nothing is left to do, or a time of ``time.monotonic`` has come."""
        if self._pid != os.getpid():
            return True
        return all([lane.idle(until) for lane in (self._lane, *self._lanes)])

    def free(self, drain: float = 5.0) -> None:
        """Wait for what is in flight, and free buffers and communicator.

        Raises
        ------
        DistTimeoutError
            If something is still in flight after `drain` seconds; it keeps what it uses.
        """
        if self._freed or self._pid != os.getpid():
            return
        self._freed = True
        until = time.monotonic() + drain
        if not self.drain(until):
            waiting = [job.what for job, _ in self._held if not job.done.is_set()]
            raise DistTimeoutError(
                f"{waiting[0] if waiting else 'an operation'} was still in flight {drain:g} s "
                "after its group was destroyed"
            )
        if self._pool is not None:
            self._pool.clear()
        self._held.clear()
        if self._made is not None:
            self._made.free(max(until - time.monotonic(), 1.0))
