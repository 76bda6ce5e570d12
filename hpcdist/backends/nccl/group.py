"""A group over NCCL: the backend that its operations go to."""

from __future__ import annotations

import atexit
import time
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from hpcdist import _engine, _nccl, config
from hpcdist._nccl import Communicator, SingleCalls, StreamQueue
from hpcdist.backends import cuda
from hpcdist.backends.base import BackendOptions, GroupBackend
from hpcdist.errors import DistBackendError, DistTimeoutError, forked_error
from hpcdist.flight_recorder import Where, recorder

from . import host_arrays, messages, movements, reductions
from .channel import Channel, MpiChannel
from .communicators import Communicators
from .options import NCCLOptions
from .recording import Recording
from .tensors import check_count, region

#: The operations that are native as a whole.
_SINGLE_CALLS = ("all_reduce", "broadcast", "all_gather_into_tensor", "reduce_scatter_tensor")
_living: weakref.WeakSet[NcclGroup] = weakref.WeakSet()


class NcclGroup(GroupBackend):
    """A group whose tensors NCCL moves; ranks are group ranks.

    Host arrays are taken only from hpcdist's own operations on objects, which name themselves with
    ``api``: they go through a tensor on the device.

    Parameters
    ----------
    channel : Channel
        Communication of the ranks on the host.
    options : BackendOptions
        The group.
    chosen : NCCLOptions
        What the user asked for.
    """

    has_devices = True

    def __init__(self, channel: Channel, options: BackendOptions, chosen: NCCLOptions) -> None:
        self.channel = channel
        self.rank, self.size, self.name = channel.rank, channel.size, options.group_id
        #: How many groups have been made from this one.
        self.derived = 0
        self._freed = False
        compare = None
        if chosen.checks and self.size > 1:
            if not isinstance(channel, MpiChannel):
                raise DistBackendError(
                    f"the entry check of the group {self.name!r} over NCCL (HPCDIST_NCCL_CHECK) "
                    "needs MPI on the host: use backend 'cpu:mpi,cuda:nccl', or leave it off"
                )
            compare = channel.compare
        #: Whether ranks compare what they call before each collective; 0 for no.
        self.check = int(compare is not None)
        runtime, seconds = cuda.runtime(), options.timeout.total_seconds()
        self.communicators = Communicators(channel, chosen, runtime, self.name, seconds)
        self.communicators.beside = self._beside(options)
        self.queue = StreamQueue(
            self.name,
            self.rank,
            self.size,
            seconds,
            runtime,
            self.communicators,
            urgent=chosen.urgent,
            blocking_wait=bool(config.get("nccl_blocking_wait")),
            compare=compare,
            recording=self._recording(options),
            device=_device(options),
        )
        # bound, because a Python method around them would take a tenth of their time
        calls = SingleCalls(self.queue, host_arrays.run_on_copies)
        for name in _SINGLE_CALLS:
            setattr(self, name, getattr(calls, name))
        _living.add(self)

    def _recording(self, options: BackendOptions) -> Recording | None:
        kept = recorder()
        if kept is None:
            return None
        ranks = list(options.global_ranks_in_group) or list(range(self.size))
        return Recording(kept, Where(self.name, self.name, ranks, ranks[self.rank]), self.rank)

    def _beside(self, options: BackendOptions) -> _engine.Beside | None:
        """The group's place in the native flight recorder, which is the job's over MPI."""
        if not isinstance(self.channel, MpiChannel):
            return None
        ranks = list(options.global_ranks_in_group) or list(range(self.size))
        return _engine.Beside(self.channel.comm, f"{self.name} (NCCL)", ranks)

    @property
    def timeout(self) -> float:
        """Seconds after which a missing peer is an error."""
        return self.queue.timeout

    @timeout.setter
    def timeout(self, value: Any) -> None:
        self.queue.timeout = value
        self.communicators.timeout = self.queue.timeout

    @property
    def seq(self) -> int:  # type: ignore[override]
        """Number of operations begun."""
        return self.queue.seq

    @property
    def node_ranks(self) -> tuple[int, ...]:
        """Group ranks on this rank's node."""
        return self.channel.node_ranks(self.timeout)

    def failure(self) -> Exception | None:
        """The error of an operation in flight, or None; after an error the group cannot be used."""
        return self.communicators.failure()

    def create_group(
        self, ranks: Sequence[int], name: str, timeout_s: float, tag: int = 0
    ) -> NcclGroup:
        """Subgroups are made by :func:`hpcdist.backends.nccl.create`."""
        raise DistBackendError("a group over NCCL is made with backends.nccl.create")

    # --- reductions --------------------------------------------------------------------------

    def all_reduce_coalesced(self, tensors: Any, op: Any, async_op: bool = False) -> Any:
        return reductions.all_reduce_coalesced(self.queue, tensors, op, async_op)

    def reduce(self, tensor: Any, root: int, op: Any, async_op: bool = False, **about: Any) -> Any:
        return reductions.reduce(self.queue, tensor, root, op, async_op)

    def reduce_scatter(
        self, output: Any, input_list: Any, op: Any, async_op: bool = False, **about: Any
    ) -> Any:
        return reductions.reduce_scatter(self.queue, output, input_list, op, async_op)

    # --- what moves --------------------------------------------------------------------------

    def all_gather(
        self, tensor_list: Any, tensor: Any, async_op: bool = False, **about: Any
    ) -> Any:
        outputs = list(tensor_list)
        if host_arrays.is_own(tensor, about):
            return host_arrays.gather_all(self.queue, outputs, tensor)
        return movements.gather_all(self.queue, "all_gather", [outputs], [tensor], async_op)

    def all_gather_coalesced(
        self, output_lists: Any, input_list: Any, async_op: bool = False
    ) -> Any:
        return movements.all_gather_coalesced(self.queue, output_lists, input_list, async_op)

    def gather(
        self, tensor: Any, gather_list: Any, root: int, async_op: bool = False, **about: Any
    ) -> Any:
        outputs = list(gather_list or []) if self.rank == root else []
        if self.rank == root:
            check_count("gather", len(outputs), self.size, "gather_list")
        places = range(len(outputs))
        if host_arrays.is_own(tensor, about):
            return host_arrays.exchange(self.queue, [tensor], [root], outputs, places)
        return movements.exchange(
            self.queue, "gather", [tensor], [root], outputs, places, {0: root}, async_op, root
        )

    def scatter(
        self, tensor: Any, scatter_list: Any, root: int, async_op: bool = False, **about: Any
    ) -> Any:
        inputs = list(scatter_list or []) if self.rank == root else []
        if self.rank == root:
            check_count("scatter", len(inputs), self.size, "scatter_list")
        places = range(len(inputs))
        if host_arrays.is_own(tensor, about):
            return host_arrays.exchange(self.queue, inputs, places, [tensor], [root])
        return movements.exchange(
            self.queue, "scatter", inputs, places, [tensor], [root], {root: 0}, async_op, root
        )

    def all_to_all(self, outputs: Any, inputs: Any, async_op: bool = False, **about: Any) -> Any:
        return movements.all_to_all(self.queue, outputs, inputs, async_op)

    def all_to_all_single(
        self,
        output: Any,
        input: Any,
        output_splits: Any = None,
        input_splits: Any = None,
        async_op: bool = False,
        **about: Any,
    ) -> Any:
        return movements.all_to_all_single(
            self.queue, output, input, output_splits, input_splits, async_op
        )

    # --- barrier and messages ----------------------------------------------------------------

    def barrier(self, async_op: bool = False, **about: Any) -> Any:
        """Wait until all ranks have called; this call blocks the host, and not a stream alone.

        ``device`` is the index of the one it runs on; without it the group's, else the current one.
        """
        api, extra = str(about.get("api", "barrier")), int(about.get("extra", 0))
        host_arrays.refuse_capture(self.queue, api)
        flag = host_arrays.upload(self.queue, np.ones(1, np.int32), about.get("device"))
        own = region(flag, "barrier")

        def enqueue(comm: Communicator, stream: int) -> None:
            comm.all_reduce(own.address, own.address, 1, _nccl.INT32, _nccl.SUM, stream)

        return self.queue.launch(api, [own], [flag], enqueue, async_op, blocks=True, facts=(extra,))

    def isend(self, tensor: Any, dst: int, tag: int = 0) -> Any:
        """Begin to send; NCCL has no tags: messages between two ranks match in their order."""
        return messages.isend(self.queue, tensor, dst)

    def irecv(self, tensor: Any, src: int, tag: int = 0) -> Any:
        """Begin to receive from one rank."""
        return messages.irecv(self.queue, tensor, src)

    def send(self, tensor: Any, dst: int, tag: int = 0) -> None:
        """Send on the current stream."""
        if isinstance(tensor, np.ndarray):
            copy = host_arrays.upload(self.queue, tensor)
            host_arrays.wait_on_host(self.isend(copy, dst, tag))
            return
        self.isend(tensor, dst, tag).wait()

    def recv(self, tensor: Any, src: int, tag: int = 0) -> int:
        """Receive on the current stream; returns the sender's rank."""
        if isinstance(tensor, np.ndarray):
            copy = host_arrays.upload(self.queue, tensor)
            host_arrays.wait_on_host(self.irecv(copy, src, tag))
            self.queue.runtime.download(copy, tensor)
            return src
        self.irecv(tensor, src, tag).wait()
        return src

    def batch_isend_irecv(self, operations: Sequence[tuple[bool, Any, int, int]]) -> list[Any]:
        """Begin messages together, on the communicator of all ranks."""
        return messages.batch_isend_irecv(self.queue, operations)

    def look_at_batch(self, operations: Sequence[tuple[bool, Any, int, int]]) -> None:
        """Raise what batch_isend_irecv would raise before it begins anything."""
        messages.look_at_batch(operations)

    # --- the end -----------------------------------------------------------------------------

    def free(self, drain: float = 5.0) -> None:
        """Wait for what is in flight, and free the communicators.

        Raises
        ------
        DistTimeoutError
            If something is still in flight after `drain` seconds; the communicators are aborted.
        DistError
            What went wrong in flight, if no call has raised it yet.
        """
        lost = None
        if _nccl.forked():
            return  # what it has belongs to the parent
        with self.queue.lock:
            if self._freed:
                return
            self.close()
            end = time.monotonic() + drain
            late = self.queue.drain(drain)
            for comm in self.communicators.all():
                if comm.unheard:
                    lost = lost or comm.async_error()
            self.communicators.end(late is not None, end)
            if late is None:
                self.queue.forget_all()
            self.communicators.forget()
            if self.communicators.beside is not None:
                self.communicators.beside.part()
            self.channel.free()
        if late is not None:
            raise DistTimeoutError(
                f"{late} was still in flight {drain:g} s after its group was destroyed; it was "
                "aborted"
            )
        if lost is not None:
            raise lost

    def close(self) -> None:
        """Refuse all further operations, without freeing anything."""
        self._freed = True
        self.queue.close("freed")

    def abort(self) -> None:
        """Abort the communicators on this rank, without the others; the group cannot be used on.

        Any thread may call it. Operations in flight have no result: their handles raise.
        """
        if _nccl.forked():
            raise forked_error("NCCL")
        self.queue.close("aborted")
        self.communicators.abort()


def _device(options: BackendOptions) -> int | None:
    """The device that the group was given, or else its parent."""
    if options.device is None and isinstance(options.parent, NcclGroup):
        return options.parent.queue.device
    return options.device


@atexit.register
def _at_exit() -> None:
    """Stop the use of events, which the interpreter destroys at its end."""
    _nccl.stop_watching()
    for each in list(_living):
        each.close()
