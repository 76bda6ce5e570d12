"""Failed backward passes: keeps the error, and releases the peers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from hpcdist.backends.dispatch import serving
from hpcdist.errors import DistError, DistMismatchError, DistNaNError, RankFailedError
from hpcdist.parallel.reducer import texts
from hpcdist.parallel.reducer.bounded import give_up
from hpcdist.parallel.reducer.stats import Stats
from hpcdist.parallel.reducer.transfer import API_END, Transfer

# Private to torch: a torch without them fails at the import, not in backward.
current_backward = torch._C._current_graph_task_id  # autograd's number; -1 outside of backward
_queue_callback = torch.autograd.Variable._execution_engine.queue_callback

# The name that peers see when this rank's backward ended before all buckets were full.
API_ABANDON = "DistributedDataParallel: backward ended without all gradients"


class Failure:
    """Keeps the error after which averages are lost, and ensures that no peer waits in vain.

    Parameters
    ----------
    transfer : Transfer
        What moves the buckets.
    stats : Stats
        Where errors are recorded.

    Attributes
    ----------
    error : BaseException or None
        The last error after which the ranks' parameters may have drifted apart.
    """

    def __init__(self, transfer: Transfer, stats: Stats) -> None:
        self.error: BaseException | None = None
        self._transfer, self._stats = transfer, stats
        self._barriers: list[Any] | None = None  # under way, since an exception ended backward

    @property
    def signalled(self) -> bool:
        """Whether an exception has ended a backward that :meth:`abandon` has not yet finished."""
        return self._barriers is not None

    def note(self, error: BaseException) -> None:
        """Record an error as the reason why no further forward is possible."""
        self.error = error
        self._stats.failed(error)

    def forget(self) -> None:
        """Go on: the group was reconfigured, and the program has put its parameters in order."""
        self.error = None

    def settle(self, call: Callable[[], Any]) -> bool:
        """Make a blocking call and keep its error, if it is the first after which no rank goes on.

        After an error that left the ranks in step, a NaN for instance, each bucket has the same
        outcome on all of them, and the next pass averages all gradients.

        Returns
        -------
        bool
            Whether it was without an error.
        """
        try:
            call()
        except DistError as error:
            if error.in_step:
                self._stats.failed(error)
            elif self.error is None:
                self.note(error)
            return False
        return True

    def of_finish(self, error: BaseException, buckets: Sequence[Any], more: int) -> None:
        """Record an error raised while this rank waited for its averages."""
        hook = self._transfer.has_hook
        in_step = isinstance(error, DistError) and error.in_step
        if in_step and not hook:
            self._stats.failed(error)
        else:
            self.note(error)
            for bucket in buckets:
                bucket.let_go()
        if not hook and isinstance(error, DistMismatchError):
            self.cut_off(buckets, len(buckets), 0)  # in place of buckets that only others reduce
        # Operations in flight end soon, in one way or another, and their errors do not matter.
        # After other errors each bucket could take a timeout; but what a hook returns may fail
        # alone, and then the other ranks wait for this one behind them.
        ends_soon = in_step or isinstance(error, (DistMismatchError, RankFailedError))
        try:
            for bucket in buckets if ends_soon or (hook and isinstance(error, Exception)) else ():
                if bucket.work is not None:
                    with suppress(Exception):  # a program's own object may raise each time
                        self.settle(partial(give_up, bucket.work))
        finally:
            if hook:  # whose second calls need not have been made
                self.cut_off(buckets, len(buckets), more)
                if not self._barriers:
                    self._transfer.refuse(buckets, error)
        barriers, self._barriers = self._barriers or [], None
        for barrier in barriers if ends_soon else ():
            self.settle(barrier.wait)

    def cut_off(self, buckets: Sequence[Any], started: int, more: int, beside: int = 0) -> None:
        """Signal peers that an exception has ended this rank's backward; does not wait.

        Peers may be waiting in the all-reduces that this rank never started. Starting those with
        incomplete gradients would be wrong; starting nothing would leave peers waiting until their
        timeout or, worse, match their buckets with what this rank calls next. So this rank enters a
        barrier in place of each: if a peer is in an all-reduce, the entry check raises on both
        sides, and if all ranks gave up at the same bucket, the barriers match and nothing is lost.

        Parameters
        ----------
        buckets : sequence of Bucket
            All of them.
        started : int
            How many have been started.
        more : int
            Calls that follow the last bucket.
        beside : int
            Calls of layers in which peers may wait.
        """
        # with several backends, peers wait in the one that moves the buckets
        comm = serving(self._transfer.place or self._transfer.comm, buckets[0].buffer)
        if self._barriers is not None:
            return
        for bucket in buckets:
            bucket.let_go()
        barriers = self._barriers = []
        missing = self._transfer.missing_calls(len(buckets), started, more)
        if not self._transfer.has_hook:  # then a sparse bucket is waited for with further calls
            missing += sum(bucket.waits for bucket in buckets if bucket.sparse) + beside
        if missing and comm.check > 0:  # unchecked, a barrier would corrupt the peers' sums
            for _ in range(missing):
                self.settle(lambda: barriers.append(comm.barrier(async_op=True, api=API_ABANDON)))
        elif missing and comm.size > 1:
            self.note(
                DistError(
                    "backward ended before all buckets were reduced, and with the entry check "
                    "off there is no safe way to tell the other ranks"
                )
            )
        if comm.native is not None:
            comm.native.give_up()

    def abandon(
        self, buckets: Sequence[Any], started: int, more: int, waits: Sequence[Callable[[], Any]]
    ) -> None:
        """Finish a backward pass that will never fill the remaining buckets.

        After an exception of a signal handler call it again: what is in flight uses the buckets.

        Parameters
        ----------
        buckets : sequence of Bucket
            All of them.
        started : int
            How many have been started.
        more : int
            Calls that follow the last bucket.
        waits : sequence of callable
            Each waits for something else of the pass that may be in flight.
        """
        self.cut_off(buckets, started, more)
        well = True
        for bucket in buckets[:started]:
            work = bucket.work
            if not hasattr(work, "give_up") and not hasattr(work, "is_completed"):
                bucket.work = None  # a program's own object: it may raise each time
            if work is not None:
                well &= self.settle(partial(give_up, work))
        for wait in waits:
            well &= self.settle(wait)
        for barrier in self._barriers or []:
            self.settle(barrier.wait)
        # If it has made all calls, the others are at the end of their pass, or have given up too.
        if not self._barriers and self.error is not None:
            self._transfer.refuse(buckets, self.error)
        elif not self._barriers and not self._transfer.has_hook:
            self._transfer.given_up += well  # else the other ranks have no averages either
        elif not self._barriers:
            try:
                self._transfer.agree(buckets, API_ABANDON)
            except BaseException as error:
                self.note(error)
                if not isinstance(error, DistError):
                    raise
        self._barriers = None
        # A peer that had given up goes no further. Only now: what this rank calls above depends on
        # what its own calls ended with.
        broken = self._transfer.broken
        if self.error is None and broken is not None and _gave_up(broken):
            self.note(broken)


def _gave_up(error: DistMismatchError) -> bool:
    """Whether a peer of a call had ended its backward, rather than called something else."""
    return any(name in str(error) for name in (API_ABANDON, API_END))


def name_nans(
    error: BaseException, names: Sequence[str], parameters: Sequence[torch.Tensor]
) -> None:
    """Add to the error of a refused reduction which gradients contain NaNs on this rank.

    Parameters
    ----------
    error : BaseException
        Any other error than a DistNaNError stays as it is.
    names : sequence of str
        Of the parameters.
    parameters : sequence of torch.Tensor
        With the gradients that this rank has given, or their averages.
    """
    if not isinstance(error, DistNaNError):
        return
    found = []
    for name, parameter in zip(names, parameters, strict=True):
        gradient = parameter.grad
        if gradient is not None and gradient.is_sparse:
            gradient = gradient._values()
        if gradient is not None and bool(torch.isnan(gradient).any()):
            found.append(name)
    if found:
        error.args = (f"{error}{texts.nans(found)}",)


def watch(reducer: Any) -> None:
    """Call an object where the current backward pass of this thread ends.

    Parameters
    ----------
    reducer : object
        Its `end_of_backward` is called at the end; its `cut_off`, with autograd's number of the
        pass, after an exception.
    """
    _queue_callback(_EndOfBackward(reducer, current_backward()))


class _EndOfBackward:
    """The callback that autograd calls at the end of a backward pass, or drops after an exception.

    Parameters
    ----------
    reducer : object
        What waits for the end of the pass: its `end_of_backward` or its `cut_off` is called.
    task : int
        Autograd's number of the pass.
    """

    __slots__ = ("_reducer", "_task")

    def __init__(self, reducer: Any, task: int) -> None:
        self._reducer = reducer
        self._task = task

    def __call__(self) -> None:
        reducer, self._reducer = self._reducer, None
        if reducer is None:
            return
        try:
            reducer.end_of_backward()
        except BaseException:
            reducer.cut_off(self._task)  # a hook may have raised; after other errors it is over
            raise

    def __del__(self) -> None:
        if self._reducer is not None:
            self._reducer.cut_off(self._task)
