"""A group over NCCL: its communicators, its streams, and the start of operations."""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

from hpcdist import _nccl, _nccl_loader, config, dtypes, log
from hpcdist._engine import disordered
from hpcdist._nccl import Communicator
from hpcdist.backends import cuda
from hpcdist.backends.base import BackendOptions, GroupBackend
from hpcdist.errors import DistBackendError, DistError, DistTimeoutError, forked_error
from hpcdist.flight_recorder import NCCL, Entry, Where, recorder

from .channel import Channel, MpiChannel
from .options import NCCLOptions

__all__ = ["Launcher", "Part", "message", "named", "region"]

_log = log.get_logger("nccl")

#: How torchfrtrace calls operations, where it has another name for them.
_TRACED = {
    "all_gather_into_tensor": "_all_gather_base",
    "reduce_scatter_tensor": "_reduce_scatter_base",
    "all_reduce_coalesced": "allreduce_coalesced",
    "all_gather_coalesced": "ALLGATHER_coalesced",
    "all_to_all_single": "all_to_all",
    "barrier": "all_reduce_barrier",
}
_living: weakref.WeakSet[Launcher] = weakref.WeakSet()


class Part(NamedTuple):
    """A tensor as NCCL sees it."""

    address: int
    elements: int
    dtype: int
    device: int

    @property
    def size(self) -> int:
        """Number of bytes."""
        return self.elements * dtypes.lookup(self.dtype).itemsize


def region(tensor: Any, role: str, writable: bool = True) -> Part:
    """Look at a tensor: where it is, and of what."""
    memory = cuda.runtime()
    return Part(*_nccl.region(tensor, writable, memory.memory, memory.name, role))


def message(tensor: Any, role: str, sends: bool) -> Part:
    """Look at a tensor that is sent or received: its elements must be in C order."""
    part = region(tensor, role, not sends)
    if part.elements > 1 and not tensor.is_contiguous():
        raise disordered(sends)
    return part


def named(api: str, about: dict[str, Any]) -> tuple[str, int]:
    """What an operation is called in messages, and the number that ranks must have in common."""
    return str(about.get("api", api)), int(about.get("extra", 0))


def within(call: Callable[[], Any], seconds: float, what: str) -> Any:
    """Run a call that may block for ever in a thread, and wait for it here.

    NCCL's blocking calls have no timeout. If one does not return, its thread stays behind; it does
    not have the GIL.
    """
    result: list[Any] = []
    error: list[BaseException] = []
    done = threading.Event()

    def run() -> None:
        try:
            result.append(call())
        except BaseException as problem:
            error.append(problem)
        finally:
            done.set()

    threading.Thread(target=run, name="hpcdist-nccl", daemon=True).start()
    if not done.wait(seconds):
        raise DistTimeoutError(
            f"{what} did not come back after {seconds:g} s: another rank has not come, or died. "
            "NCCL is left waiting in a thread of its own"
        )
    if error:
        raise error[0]
    return result[0]


class _Several:
    """The state of messages that start together."""

    def __init__(self, entries: list[Entry]) -> None:
        self._entries = entries

    def follow(self, native: Any) -> None:
        """They are in flight."""
        for entry in self._entries:
            entry.follow(native)

    def failed(self) -> None:
        """They could not start."""
        self._entries[0].failed()


class Launcher(_nccl.Operations, GroupBackend):  # type: ignore[misc]  # names api and extra alone
    """What all operations of a group over NCCL share; the native class starts them.

    Parameters
    ----------
    channel : Channel
        Communication of the ranks on the host.
    options : BackendOptions
        The group.
    chosen : NCCLOptions
        What the user asked for.
    """

    def __init__(self, channel: Channel, options: BackendOptions, chosen: NCCLOptions) -> None:
        super().__init__(
            channel.rank, channel.size, options.group_id, options.timeout.total_seconds()
        )
        self.channel = channel
        self._chosen = chosen
        self.use(cuda.runtime())
        self._made = 0
        #: How many groups have been made from this one.
        self.derived = 0
        self._made_with: dict[int, int] = {}
        self._checks = chosen.checks and self.size > 1
        self._blocking_wait = bool(config.get("nccl_blocking_wait"))
        self._recorder = recorder()
        ranks = list(options.global_ranks_in_group) or list(range(self.size))
        self._where = Where(self.name, self.name, ranks, ranks[self.rank])
        if self._checks and not isinstance(channel, MpiChannel):
            raise DistBackendError(
                f"the entry check of the group {self.name!r} over NCCL (HPCDIST_NCCL_CHECK) needs "
                "MPI on the host: use backend 'cpu:mpi,cuda:nccl', or leave it off"
            )
        _living.add(self)

    @property
    def node_ranks(self) -> tuple[int, ...]:
        """Group ranks on this rank's node, as far as the host's channel knows."""
        if isinstance(self.channel, MpiChannel):
            return tuple(self.channel.comm.node_ranks)
        return (self.rank,)

    @property
    def check(self) -> int:
        """Whether ranks compare what they call before each collective; 0 for no."""
        return int(self._checks)

    def failure(self) -> Exception | None:
        """The error of an operation in flight, or None; after an error the group cannot be used."""
        for comm in (*self._comms.values(), *self._pairs.values()):
            if comm.failed:
                return comm.async_error()
        return None

    # --- communicators -----------------------------------------------------------------------

    def connect(self, index: int) -> Communicator:
        """The communicator of all ranks on a device; all of them call it together."""
        made = self._comms.get(index)
        if made is None:
            self._made += 1
            roots = self._roots()
            unique = _nccl.unique_id() if self.rank in roots else b""
            found = self.channel.agree(self._made, unique, self.timeout, roots)
            made = self._comms[index] = self._join(index, found, self.size, self.rank)
        return made

    def _own(self, comm: Communicator) -> Communicator:
        """A communicator that has been made for this group."""
        comm.timeout = self.timeout
        comm.named(f"of the group {self.name!r} on rank {self.rank}")
        return comm

    def _roots(self) -> range:
        """Ranks that make an identity: with one for many ranks all of them connect to one."""
        each = config.get("nccl_ranks_per_root")
        scalable = "init_rank_scalable" in _nccl_loader.load().optional
        return range(0, self.size, each) if scalable else range(1)

    def adopt(self, index: int, comm: Communicator) -> None:
        """Take a communicator of the group's ranks that was made from another group's."""
        self._comms[index] = self._own(comm)

    def communicator(self, index: int) -> Communicator | None:
        """The communicator of all ranks on a device, if there is one that can be used."""
        comm = self._comms.get(index)
        return comm if comm is not None and not comm.failed and comm.state == "ready" else None

    def _connect_with(self, index: int, peer: int) -> Communicator:
        """The communicator of this rank and another, for messages outside a batch."""
        if peer == self.rank:
            raise ValueError(
                f"rank {self.rank} of the group {self.name!r} cannot send to itself over NCCL "
                "outside a batch: use batch_isend_irecv with both sides, or copy the tensor"
            )
        made = self._pairs.get(peer)
        if made is None:
            number = self._made_with.get(peer, 0) + 1
            self._made_with[peer] = number
            low = self.rank < peer
            unique = _nccl.unique_id() if low else b""
            unique = self.channel.agree_with(peer, number, unique, self.timeout)
            made = self._pairs[peer] = self._join(index, [unique], 2, 0 if low else 1)
        return made

    def _join(self, index: int, unique: list[bytes], size: int, rank: int) -> Communicator:
        limit, blocks = self.timeout, self._chosen.blocks

        def init() -> Communicator:
            return Communicator.init(unique, size, rank, blocks, limit)

        made = self._own(self.in_time(index, init, "ncclCommInitRankConfig"))
        if self._aborted:  # by another thread meanwhile
            made.abort()
        return made

    def in_time(self, index: int, call: Callable[[], Any], what: str) -> Any:
        """Make a call that waits for the other ranks, with the group's timeout."""

        def entered() -> Any:
            self._runtime.enter(index)
            return call()

        if not self._chosen.blocks:
            return entered()  # the communicator keeps the time itself
        about = f"{what} of the group {self.name!r} (rank {self.rank})"
        return within(entered, self.timeout, about)

    def _stream(self, index: int) -> Any:
        """A stream of the group's own, for a device."""
        return self._runtime.stream(index, self._chosen.urgent)

    # --- operations --------------------------------------------------------------------------

    def _note(self, kind: str, ins: Any, outs: Any, peer: int = -1) -> Entry | _Several:
        """Record an operation that begins in the flight recorder."""
        if kind == "batch_isend_irecv":
            return self._note_batch(ins)
        if peer >= 0:
            return self._note_message(kind == "isend", ins[0], peer)
        return self._begin(_TRACED.get(kind, kind), ins, outs)

    def _note_message(self, sends: bool, tensor: Any, peer: int, joined: bool = False) -> Entry:
        name, arrow = ("send", "->") if sends else ("recv", "<-")
        ins, outs = ([tensor], []) if sends else ([], [tensor])
        return self._begin(name, ins, outs, f"{self.rank}{arrow}{peer}", joined)

    def _note_batch(self, operations: Any) -> _Several:
        made = [
            self._note_message(sends, tensor, peer, place > 0)
            for place, (sends, tensor, peer, _) in enumerate(operations)
        ]
        return _Several([*made, self._begin("coalesced", [], [], "", True)])

    def _begin(
        self, name: str, ins: Any, outs: Any, peers: str | None = None, joined: bool = False
    ) -> Entry:
        assert self._recorder is not None
        return self._recorder.add(self._where, name, ins, outs, self.timeout, peers, joined, NCCL)

    def _outside_graph(self, api: str) -> None:
        """Refuse what needs the host: a CUDA graph that is being captured cannot hold it."""
        if self._runtime.capturing():
            raise DistBackendError(
                f"{api} of the group {self.name!r} cannot be captured into a CUDA graph, because "
                "the host takes part in it: call it outside of the capture"
            )

    def batch(self, *comms: Communicator) -> Any:
        """Operations that start together."""
        return _nccl.Group(*comms)

    def _compare(self, api: str, facts: tuple[Any, ...]) -> None:
        """Compare what the ranks call, over MPI: a mismatch or a missing rank raises."""
        import zlib

        import numpy as np

        assert isinstance(self.channel, MpiChannel)
        number = zlib.crc32(repr((api, facts)).encode()) >> 1
        self.channel.comm.all_gather_into_tensor(
            np.empty(self.size, np.int64), np.array([number]), api=api, extra=number
        )

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
        with self._lock:
            if self._freed:
                return
            self._freed = True
            end = time.monotonic() + drain
            late = self.drain(drain)
            for comm in [*self._comms.values(), *self._pairs.values()]:
                if comm.unheard:
                    lost = lost or comm.async_error()
                self._end(comm, late is not None, max(end - time.monotonic(), 1.0))
            if late is None:
                self.forget_all()
            self._comms.clear()
            self._pairs.clear()
            self.channel.free()
        if late is not None:
            raise DistTimeoutError(
                f"{late} was still in flight {drain:g} s after its group was destroyed; it was "
                "aborted"
            )
        if lost is not None:
            raise lost

    def _end(self, comm: Communicator, abort: bool, seconds: float) -> None:
        try:
            if abort or comm.failed:
                within(comm.abort, seconds, "ncclCommAbort")
                return
            within(lambda: self._finish(comm), seconds, "ncclCommDestroy")
        except DistError as error:
            _log.warning("the group %r could not be freed in order: %s", self.name, error)

    @staticmethod
    def _finish(comm: Communicator) -> None:
        comm.finalize(5.0)
        comm.destroy()

    def abort(self) -> None:
        """Abort the communicators on this rank, without the others; the group cannot be used on.

        Any thread may call it. Operations in flight have no result: their handles raise.
        """
        if _nccl.forked():
            raise forked_error("NCCL")
        self._aborted = True
        for comm in [*self._comms.values(), *self._pairs.values()]:
            comm.abort()


@atexit.register
def _at_exit() -> None:
    """Stop the use of events, which the interpreter destroys at its end."""
    _nccl.stop_watching()
    for each in list(_living):
        each._freed = True
