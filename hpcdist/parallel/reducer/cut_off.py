"""Backward passes that an exception ends: how the peers learn of it, and the next forward.

A pass that is cut off leaves autograd without a call of its callback. Its end is noticed when that
callback is freed, or by the next forward at the latest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hpcdist.errors import DistError
from hpcdist.parallel.reducer import texts
from hpcdist.parallel.reducer.beside import Beside
from hpcdist.parallel.reducer.failure import Failure, current_backward
from hpcdist.parallel.reducer.pipeline import Pipeline
from hpcdist.parallel.reducer.stats import Stats
from hpcdist.parallel.reducer.transfer import Transfer


class CutOff:
    """Knows which backward pass is under way, and ends it if an exception has.

    Parameters
    ----------
    pipeline : Pipeline
        What packs the buckets.
    transfer : Transfer
        What moves them.
    stats : Stats
        Where errors are recorded.

    Attributes
    ----------
    failure : Failure
        Keeps the error after which averages are lost, and releases the peers.
    beside : Beside
        The layers that make calls in the pass.
    task : int or None
        Autograd's number of the pass; None: there is none.
    averages : bool
        Whether it may add to parameters: other ranks wait for their gradients.
    """

    def __init__(self, pipeline: Pipeline, transfer: Transfer, stats: Stats) -> None:
        self._pipeline, self._transfer = pipeline, transfer
        self.failure = Failure(transfer, stats)
        self.beside = Beside()
        self.task: int | None = None
        self.averages = False

    def begin(self, averages: bool) -> None:
        """The pass of :attr:`task` begins."""
        self.averages = averages
        self.beside.begin(self._transfer.comm)

    def over(self) -> None:
        """The pass is over; the layers' nodes would hold its graph."""
        self.task = None
        self.beside.reset()

    @property
    def left_behind(self) -> bool:
        """Whether an exception has ended the pass, as can be seen outside of backward."""
        return self.task is not None and current_backward() == -1

    def precedes(self, task: int) -> bool:
        """Whether the pass before that of this number was cut off, with no forward in between."""
        return self.failure.signalled and self.task != task

    def signal(self, task: int | None, running: bool) -> None:
        """Signal peers that an exception ended backward, if `task` is the current pass.

        Parameters
        ----------
        task : int
            Autograd's number of the backward.
        running : bool
            Whether the first gradient of the pass is ready.
        """
        if self.task != task:
            return
        if self.averages and not self.failure.signalled:
            transfer, pipeline = self._transfer, self._pipeline
            if not running:
                transfer.begin()  # no gradient has
            transfer.broken = transfer.broken or self.beside.failed(task)
            beside = self.beside.missing(task)
            self.failure.cut_off(pipeline.buckets, pipeline.started, pipeline.follows, beside)
        self.beside.reset()  # its nodes hold the graph

    def abandon(self, running: bool, waits: Sequence[Callable[[], object]]) -> None:
        """Finish a backward pass that will never fill the remaining buckets.

        Parameters
        ----------
        running : bool
            As for :meth:`signal`.
        waits : sequence of callable
            Each waits for something else of the pass that may be in flight.
        """
        self.signal(self.task, running)
        pipeline = self._pipeline
        self.failure.abandon(pipeline.buckets, pipeline.started, pipeline.follows, waits)

    def check(self, reconfigured: bool) -> None:
        """Raise if reducing gradients failed earlier, on this rank or on a peer.

        Parameters
        ----------
        reconfigured : bool
            Whether the group is another one since: the ranks that are left go on.
        """
        if reconfigured:
            self.failure.forget()
        if self.failure.error is None:
            late = self._transfer.failure(self._pipeline.buckets[0])
            if late is not None:
                self.failure.note(late)
                raise late
        self.refuse()

    def refuse(self) -> None:
        """Raise if averages have been lost."""
        error = self.failure.error
        if error is not None:
            rank = self._transfer.group.members.ranks[self._transfer.comm.rank]
            raise DistError(texts.earlier_failure(rank, error)) from error
