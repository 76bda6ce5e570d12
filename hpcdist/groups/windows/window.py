"""Windows: memory of each rank that the others write and read without its help.

A window registers a tensor of each rank. Where all are symmetric (:func:`hpcdist.empty`), ``put``,
``get`` and ``accumulate`` are copies within the node's memory; else they are requests, which a
thread of the other rank serves. A signal is an empty message of MPI, so a wait for one ends as
every other wait does: by the timeout, by Ctrl-C, by the death of the peer.
"""

from __future__ import annotations

import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from hpcdist import _engine
from hpcdist._buffer import limited
from hpcdist._engine import Work
from hpcdist._ops import ReduceOp
from hpcdist.errors import DistBackendError, DistTimeoutError
from hpcdist.groups.windows.memory import WindowMemory
from hpcdist.groups.windows.options import (
    PutOptions,
    SignalOptions,
    WaitSignalOptions,
    WindowAccessType,
    WindowAttr,
    seconds_of,
)
from hpcdist.groups.windows.remote import RemotePart

if TYPE_CHECKING:
    import torch


class Window(WindowMemory):
    """Memory of each rank of a group that the others write and read without its help.

    Made by :meth:`hpcdist.ProcessGroup.new_window`. Peers are named by their rank in the group.
    What one rank writes and another reads must be ordered by the program: the writer calls
    :meth:`signal` after its puts, and the reader :meth:`wait_signal` before it reads, or all wait
    for their Works and call :func:`hpcdist.barrier`. Another collective on the window's memory does
    not order them: it may return here while another rank still reads or writes there.

    Notes
    -----
    Source: ``torch.distributed.Window`` of torch 2.15, which has neither ``get`` nor
    ``accumulate``.
    """

    # ---- forms of options and handles ----

    def _seconds(self, opts: PutOptions | None) -> float | None:
        """Return the limit that options give, or None; raise where they are none."""
        return seconds_of(opts)

    def _handle(self, work: Work, tensors: list[torch.Tensor]) -> Work:
        """Return what the caller gets for an operation on these tensors."""
        return work

    # ---- data ----

    def put(
        self,
        tensor: torch.Tensor,
        dst_rank: int,
        target_offset_nelems: int = 0,
        async_op: bool = False,
        opts: PutOptions | None = None,
    ) -> Work:
        """Write a tensor into a rank's window memory. Local to this process.

        Parameters
        ----------
        tensor : torch.Tensor
            Of the window's dtype, on the host; may be non-contiguous or empty, and may overlap the
            memory that it is written to. It may be changed when the data are in place, but not
            after a timeout or an exception of a signal handler.
        dst_rank : int
            Rank in the group; also this rank.
        target_offset_nelems : int
            Where to begin, in elements.
        async_op : bool
            Whether to return before the rank has answered, where its memory is not mapped. The data
            are in place when the Work is complete; if nobody waits for it, when a later
            :meth:`signal` to the rank has returned.
        opts : PutOptions, optional
            `timeout`: how long to wait for the rank's answer, where its memory is not mapped.

        Returns
        -------
        Work
            Complete unless `async_op` is true; it then raises what is said here of the peer.

        Raises
        ------
        ValueError
            If the rank is not in the group, or the elements do not fit.
        TypeError
            If the dtype or the device is another one.
        DistError
            If no tensor is registered, or the group was destroyed.
        DistMismatchError
            If the peer has destroyed the group, or dropped it and this window. Where it does so
            during the call, it may succeed.
        RankFailedError
            If the peer has died, left the job or destroyed the default group.
        DistBackendError
            If the peer's tensor is no longer symmetric: an operation on it has failed. If the peer
            has refused the request.
        DistTimeoutError
            If the peer has not answered in time. The data may still be written, before those of
            this rank's later calls.
        DistNaNError
            With ``HPCDIST_NAN_CHECK``, if the tensor contains a NaN. Nothing was written.
        """
        seconds = self._seconds(opts)
        part, offset = self._range(tensor, dst_rank, target_offset_nelems, "put")
        work = part.put(tensor, offset, seconds, async_op)
        part.check("put")
        return self._handle(work or self._comm.finished([tensor]), [tensor])

    def get(
        self,
        tensor: torch.Tensor,
        src_rank: int,
        target_offset_nelems: int = 0,
        async_op: bool = False,
        opts: PutOptions | None = None,
    ) -> Work:
        """Read from a rank's window memory into a tensor. Local to this process.

        Parameters
        ----------
        tensor : torch.Tensor
            Takes the elements; as many as it has are read. Of the window's dtype, on the host. May
            be non-contiguous, and overlap the memory that is read.
        src_rank : int
            Rank in the group; also this rank.
        target_offset_nelems : int
            Where to begin there, in elements.
        async_op : bool
            As for :meth:`put`: the tensor has the data when the Work is complete. Where the
            tensor's elements do not lie in order, that is when the call returns.
        opts : PutOptions, optional
            As for :meth:`put`.

        Returns
        -------
        Work
            Complete unless `async_op` is true.

        Raises
        ------
        ValueError, TypeError, DistError, DistMismatchError, RankFailedError, DistBackendError
            As :meth:`put`; ValueError also if elements of the tensor share memory.
        DistTimeoutError
            If the peer has not answered in time. Part of the tensor may have been written. If the
            data had begun to come, the error says that MPI may still write to it; so does a note of
            a signal handler's exception.
        """
        seconds = self._seconds(opts)
        part, offset = self._range(tensor, src_rank, target_offset_nelems, "get")
        work = part.get(tensor, offset, seconds, async_op)
        part.check("get")
        return self._handle(work or self._comm.finished([tensor]), [tensor])

    def accumulate(
        self,
        tensor: torch.Tensor,
        dst_rank: int,
        target_offset_nelems: int = 0,
        async_op: bool = False,
        op: Any = ReduceOp.SUM,
        opts: PutOptions | None = None,
    ) -> Work:
        """Combine a tensor with a rank's window memory, in place there. Local to this process.

        Accumulates of several ranks and threads do not mix. The order in which they come is not
        defined, and with it the last bits of sums of floats. A signal handler may call it too.

        Parameters
        ----------
        tensor : torch.Tensor
            As for :meth:`put`.
        dst_rank, target_offset_nelems, async_op
            As for :meth:`put`.
        op : ReduceOp
            SUM, PRODUCT, MIN, MAX, BAND, BOR or BXOR, as far as the dtype has it.
        opts : PutOptions, optional
            `timeout`: how long to wait for another rank that accumulates there, or for the rank's
            answer.

        Returns
        -------
        Work
            As of :meth:`put`.

        Raises
        ------
        DistTimeoutError
            If another rank held the memory for that long, or the peer has not answered.
        RankFailedError
            If a rank died while it held the memory, or the peer has left the job.
        ValueError, TypeError, DistError, DistMismatchError, DistBackendError, DistNaNError
            As :meth:`put`; TypeError also if the dtype does not have the operation.
        """
        seconds = self._seconds(opts)
        part, offset = self._range(tensor, dst_rank, target_offset_nelems, "accumulate")
        work = part.accumulate(tensor, offset, op, seconds, async_op)
        part.check("accumulate")
        return self._handle(work or self._comm.finished([tensor]), [tensor])

    def map_remote_tensor(self, rank: int) -> torch.Tensor:
        """A rank's window memory as a tensor of this process. Local to this process.

        Parameters
        ----------
        rank : int
            Rank in the group; also this rank.

        Returns
        -------
        torch.Tensor
            One dimension. The memory stays valid as long as the tensor lives, and belongs to the
            rank's tensor as long as that one does.

        Raises
        ------
        ValueError, DistError, DistBackendError
            As :meth:`put`; DistBackendError also where the memory is not mapped:
            :meth:`get_attr` tells.
        """
        part = self._part(rank, "map_remote_tensor")
        if isinstance(part, RemotePart):
            raise DistBackendError(
                f"the window memory of rank {rank} cannot be mapped: it is on another node, or was "
                "registered in ordinary memory; use get and put (get_attr tells)"
            )
        # Not a view for autograd: an operation in place may make it require gradients.
        return part.tensor.detach()

    # ---- signals ----

    def signal(
        self, peer_rank: int, async_op: bool = False, opts: SignalOptions | None = None
    ) -> Work:
        """Signal a rank. It sees everything that this rank has put before.

        The peer must call :meth:`wait_signal` once per signal. What was put or accumulated with
        ``async_op=True`` is waited for first, by whatever thread and window of the group.

        Parameters
        ----------
        peer_rank : int
            Rank in the group; also this rank.
        async_op : bool
            Whether to return before the signal is on its way.
        opts : SignalOptions, optional
            `timeout`, for the signal and what it waits for.

        Returns
        -------
        Work
            Complete unless `async_op` is true.

        Raises
        ------
        ValueError
            If the rank is not in the group.
        DistError
            If no tensor is registered, or the group was destroyed.
        DistMismatchError
            If the peer has destroyed the group before the call, or dropped it and this window.
        RankFailedError
            If the peer has died, left the job or destroyed the default group.
        DistTimeoutError
            If the peer has not answered within the timeout what this rank has put with
            ``async_op=True``, which goes on. There is no signal then.
        DistTimeoutError, DistBackendError
            If what this rank has put so has ended with such an error, and its Work has not said it
            yet. There is no signal then.
        """
        comm, seconds = self._live(), self._seconds(opts)
        self._part(peer_rank, "signal")
        comm.refuse_withdrawn(int(peer_rank), "signal")
        began = time.monotonic()
        _engine.settle(comm, int(peer_rank), -1.0 if seconds is None else seconds)
        work = comm.isend(_nothing(), peer_rank, self._tag, tag_kind=_engine.SIGNAL)
        if not async_op:
            work.wait(seconds and max(0.0, seconds - (time.monotonic() - began)))
        return self._handle(work, [])

    def wait_signal(
        self, peer_rank: int, async_op: bool = False, opts: WaitSignalOptions | None = None
    ) -> Work:
        """Wait for one signal of a rank.

        Signals of a rank are counted: each wait takes one.

        Parameters
        ----------
        peer_rank : int
            Rank in the group; also this rank.
        async_op : bool
            Whether to return at once.
        opts : WaitSignalOptions, optional
            `timeout`, instead of the group's. A wait that raises takes no signal.

        Returns
        -------
        Work
            Complete unless `async_op` is true.

        Raises
        ------
        ValueError, DistError
            As :meth:`signal`.
        DistTimeoutError
            If there was no signal in time.
        RankFailedError
            If the peer has left the job.
        """
        comm = self._live()
        self._part(peer_rank, "wait_signal")
        peer_rank = int(peer_rank)  # of a tensor without dimensions, too
        seconds = self._seconds(opts)
        receive = partial(comm.irecv, tag_kind=_engine.SIGNAL)
        kept = self._kept[peer_rank]
        works: list[Work] = []
        taken_back = map(Work.take_back, works, (kept,))  # of what works holds then
        # No handler of the process's signals runs inside extend(): what was begun is in the list.
        try:
            if kept:
                with suppress(IndexError):  # another thread took it
                    works.extend(map(list.pop, (kept,)))
            if not works:
                # a shorter time than the group has limits the wait alone, which takes no signal
                alone = not async_op and (seconds or 0.0) <= comm.timeout
                # to limited(), 0 is no limit
                with limited(0.0 if alone or seconds is None else max(seconds, 1e-9)):
                    works.extend(map(receive, (_nothing(),), (peer_rank,), (self._tag,)))
            if not async_op:
                self._wait_or_cancel(works[0], seconds, peer_rank)
            return self._handle(works[0], [])
        except BaseException:
            # First and in one instruction: a second handler may raise at the next one. The next
            # wait takes a signal that has come.
            _ = [*taken_back]
            raise

    def _wait_or_cancel(self, work: Work, seconds: float | None, peer_rank: int) -> None:
        """Wait for a signal; when time is up, cancel its receive, unless it came just then."""
        try:
            work.wait(seconds)
        except DistTimeoutError:
            if work.cancel() and seconds is not None:
                comm = self._live()
                raise DistTimeoutError(
                    f"timeout after {seconds:g} s in wait_signal of group {comm.name!r} (this "
                    f"is rank {comm.rank} of {comm.size}): no signal of rank {peer_rank}"
                ) from None
            if work.exception() is not None:
                raise

    def get_attr(self, peer_rank: int) -> WindowAttr:
        """What a rank's window memory is like.

        Parameters
        ----------
        peer_rank : int
            Rank in the group.

        Returns
        -------
        WindowAttr
            UNIFIED if this rank has mapped it, SEPARATE if it asks for it by messages.

        Raises
        ------
        ValueError
            If the rank is not in the group.
        DistError
            If no tensor is registered.
        """
        part = self._all()[self._group.members.check(peer_rank, "peer_rank")]
        remote = isinstance(part, RemotePart)
        return WindowAttr(WindowAccessType.SEPARATE if remote else WindowAccessType.UNIFIED)


def _nothing() -> Any:
    import torch

    return torch.empty(0, dtype=torch.uint8, device="cpu")
