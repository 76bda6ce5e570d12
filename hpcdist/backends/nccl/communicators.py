"""The NCCL communicators of a group: how they are made, kept and ended."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from typing import Any

from hpcdist import _nccl, _nccl_loader, config, log
from hpcdist._nccl import Communicator
from hpcdist.errors import DistError, DistTimeoutError

from .channel import Channel
from .options import NCCLOptions

_log = log.get_logger("nccl")
#: Seconds that NCCL has for an abort.
_ABORT = 10.0


class Communicators:
    """The communicators of one group.

    Parameters
    ----------
    channel : Channel
        Communication of the ranks on the host.
    chosen : NCCLOptions
        What the user asked for.
    runtime : object
        The devices, as in :mod:`hpcdist.backends.cuda`.
    name : str
        Name of the group, for messages.
    timeout : float
        Seconds for the other ranks to arrive.

    Attributes
    ----------
    whole : dict
        Index of a device -> communicator of all ranks.
    pairs : dict
        Index of a device and rank -> communicator of that rank and this one, for messages outside
        a batch.
    beside : hpcdist._engine.Beside or None
        The group's place in the flight recorder; set it before the first communicator is made.
    """

    def __init__(
        self, channel: Channel, chosen: NCCLOptions, runtime: Any, name: str, timeout: float
    ) -> None:
        self.whole: dict[int, Communicator] = {}
        self.pairs: dict[tuple[int, int], Communicator] = {}
        self.beside: Any = None
        self.timeout = timeout
        self._channel = channel
        self._rank, self._size = channel.rank, channel.size
        self._chosen = chosen
        self._runtime = runtime
        self._name = name
        self._connected = 0
        self._connected_with: dict[int, int] = {}
        #: Rank -> this rank's identity for the two, which a late one has not answered yet.
        self._offers: dict[int, bytes] = {}
        self._aborted = False

    def all(self) -> list[Communicator]:
        """Return every communicator that the group has now."""
        return [*self.whole.values(), *self.pairs.values()]

    def usable(self, index: int) -> Communicator | None:
        """Return the communicator of all ranks on a device, if there is one that can be used."""
        comm = self.whole.get(index)
        return comm if comm is not None and not comm.failed and comm.state == "ready" else None

    def failure(self) -> Exception | None:
        """Return the error of an operation in flight, or None."""
        for comm in self.all():
            if comm.failed:
                return comm.async_error()
        return None

    # --- making them -------------------------------------------------------------------------

    def connect(self, index: int) -> Communicator:
        """Return the communicator of all ranks on a device; all of them call it together."""
        made = self.whole.get(index)
        if made is None:
            self._connected += 1
            roots = self._roots()
            unique = _nccl.unique_id() if self._rank in roots else b""
            found = self._channel.agree(self._connected, unique, self.timeout, roots)
            made = self.whole[index] = self._join(index, found, self._size, self._rank)
        return made

    def connect_pair(self, index: int, peer: int) -> Communicator:
        """Return the communicator of this rank and another, for messages outside a batch."""
        if peer == self._rank:
            raise ValueError(
                f"rank {self._rank} of the group {self._name!r} cannot send to itself over NCCL "
                "outside a batch: use batch_isend_irecv with both sides, or copy the tensor"
            )
        made = self.pairs.get((index, peer))
        if made is None:
            number, low = self._connected_with.get(peer, 0) + 1, self._rank < peer
            if peer not in self._offers:
                self._offers[peer] = _nccl.unique_id() if low else b""
            unique = self._channel.agree_with(peer, number, self._offers[peer], self.timeout)
            del self._offers[peer]
            self._connected_with[peer] = number
            made = self.pairs[index, peer] = self._join(index, [unique], 2, 0 if low else 1)
        return made

    def adopt(self, index: int, call: Callable[[], Any], what: str) -> None:
        """Make the communicator of all ranks from another group's: `call` does so."""
        self.whole[index] = self._label(self._call(index, call, what))

    def _roots(self) -> range:
        """Ranks that make an identity: with one for many ranks all of them connect to one."""
        each = config.get("nccl_ranks_per_root")
        scalable = "init_rank_scalable" in _nccl_loader.load().optional
        return range(0, self._size, each) if scalable else range(1)

    def _join(self, index: int, unique: list[bytes], size: int, rank: int) -> Communicator:
        limit, blocks = self.timeout, self._chosen.blocks

        def init() -> Communicator:
            return Communicator.init(unique, size, rank, blocks, limit)

        made = self._label(self._call(index, init, "ncclCommInitRankConfig"))
        if self._aborted:  # by another thread meanwhile
            made.abort()
        return made

    def _label(self, comm: Communicator) -> Communicator:
        comm.timeout = self.timeout
        comm.named(f"of the group {self._name!r} on rank {self._rank}")
        comm.noted(self.beside)
        return comm

    def _call(self, index: int, call: Callable[[], Any], what: str) -> Any:
        """Make a call that waits for the other ranks, with the group's timeout."""

        def entered() -> Any:
            self._runtime.enter(index)
            return call()

        if not self._chosen.blocks:  # the communicator keeps the time itself
            before = self._runtime.index()
            try:
                return entered()
            finally:
                self._runtime.enter(before)
        about = f"{what} of the group {self._name!r} (rank {self._rank})"
        return _Call(entered).result(self.timeout, about)

    # --- ending them -------------------------------------------------------------------------

    def end(self, abort: bool, limit: float) -> None:
        """Free the communicators on this rank, or abort them; what goes wrong is logged.

        Parameters
        ----------
        abort : bool
            Whether to abort also those that have not failed.
        limit : float
            When to have done so, of ``time.monotonic``; each gets a second after it.
        """
        failed = [comm for comm in self.all() if abort or comm.failed]
        self._abort(failed, max(limit - time.monotonic(), 1.0))
        for comm in self.all():
            if comm not in failed:
                call = _Call(functools.partial(_destroy, comm))
                self._await(call, max(limit - time.monotonic(), 1.0), "ncclCommDestroy")

    def _abort(self, comms: list[Communicator], seconds: float) -> None:
        """Abort them at the same time: each may wait for another's kernels (`hd_nccl_guard.h`)."""
        limit = time.monotonic() + seconds
        for call in [_Call(comm.abort) for comm in comms]:
            self._await(call, max(limit - time.monotonic(), 0.0), "ncclCommAbort")

    def _await(self, call: _Call, seconds: float, what: str) -> None:
        try:
            call.result(seconds, what)
        except DistError as error:
            _log.warning("the group %r could not be freed in order: %s", self._name, error)

    def forget(self) -> None:
        """Drop all communicators, which have ended."""
        self.whole.clear()
        self.pairs.clear()

    def abort(self) -> None:
        """Abort all communicators on this rank, also one that is being made."""
        self._aborted = True
        self._abort(self.all(), _ABORT)


def _destroy(comm: Communicator) -> None:
    comm.finalize(5.0)
    comm.destroy()


class _Call:
    """A call that may block forever, in a thread of its own.

    NCCL's blocking calls have no timeout. If one does not return, its thread stays behind; it does
    not have the GIL.
    """

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self._result: Any = None
        self._error: BaseException | None = None
        self._done = threading.Event()
        threading.Thread(target=self._run, name="hpcdist-nccl", daemon=True).start()

    def _run(self) -> None:
        try:
            self._result = self._call()
        except BaseException as problem:
            self._error = problem
        finally:
            self._done.set()

    def result(self, seconds: float, what: str) -> Any:
        """Wait for it; raise what it raises, or DistTimeoutError."""
        if not self._done.wait(seconds):
            raise DistTimeoutError(
                f"{what} did not return after {seconds:g} s: another rank has not called it, or "
                "died. NCCL keeps waiting in a thread of its own"
            )
        if self._error is not None:
            raise self._error
        return self._result
