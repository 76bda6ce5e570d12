"""The pipeline of buckets: packs full ones, starts them in order, waits, distributes results.

Buckets start strictly in index order, because all ranks must start the same collectives in the same
order, while the order of their gradients may differ.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch

from hpcdist._graph import overlapping
from hpcdist.parallel.reducer import streams
from hpcdist.parallel.reducer.schedule import Schedule
from hpcdist.parallel.reducer.stats import Stats
from hpcdist.parallel.reducer.transfer import Transfer
from hpcdist.parallel.reducer.unused import Usage

# With gradients as views, a gradient of at least this size moves into its bucket when it is ready,
# which frees its own memory; smaller ones are moved together when the bucket is full.
_LARGE = 1 << 16


class Pipeline:
    """Moves the buckets of one model, once for each backward pass.

    Parameters
    ----------
    parameters : sequence of torch.nn.Parameter
        Whose gradients are averaged.
    schedule : Schedule
        What makes the buckets.
    transfer : Transfer
        What moves one.
    usage : Usage
        Exchanges which parameters the ranks use; with the last bucket, if `tracks`.
    stats : Stats
        Where to record statistics.

    Attributes
    ----------
    buckets : list of Bucket or SparseBucket
        Or pieces of them, in the order in which they are reduced.
    tracks : bool
        Whether it matters which parameters get gradients.
    singles : list of SingleBucket
        Those of one long gradient.
    after_last : callable or None
        Called once no more buckets will begin before the end of backward.
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        schedule: Schedule,
        transfer: Transfer,
        usage: Usage,
        stats: Stats,
    ) -> None:
        self._parameters = parameters
        self._schedule = schedule
        self._transfer = transfer
        self._usage = usage
        self._stats = stats
        self._streams = streams.streams_of(parameters)
        self.tracks = False
        self._next = 0  # first bucket not started
        self.after_last: Callable[[], None] | None = None
        self._late: Any = None  # the last bucket, if it waits for the end of backward
        self._ends: Callable[[], Any] | None = None  # its reduction, or a call in its place
        self._set_buckets(schedule.make(schedule.first()))
        transfer.unused = self._unused

    def _set_buckets(self, buckets: list[Any]) -> None:
        self.buckets = buckets
        self._bucket_of = [buckets[0]] * len(self._parameters)
        self.singles = [bucket for bucket in buckets if bucket.single]
        self._large: dict[int, int] = {}
        for bucket in buckets:
            for place, index in enumerate(bucket.members):
                self._bucket_of[index] = bucket
                p = self._parameters[index]
                if not bucket.sparse and bucket.as_view and p.numel() * p.itemsize >= _LARGE:
                    self._large[index] = place

    # -- between passes ------------------------------------------------------------------------

    def join(self) -> None:
        """Join the pieces of buckets, for a hook."""
        self._bucket_of = []  # free the pieces' memory before the buckets allocate theirs
        self._set_buckets(self._schedule.join(self.buckets))

    def reorder(self, order: Sequence[int]) -> None:
        """Rebuild the buckets for another order of gradients; the same on all ranks."""
        members = self._schedule.assign(order)
        if members != self._schedule.members(self.buckets):
            self._bucket_of = []  # as above
            self._set_buckets(self._schedule.exchange(self.buckets, members))

    def reset(self) -> None:
        """Prepare for the next pass."""
        self._transfer.over()
        self._next = 0
        self._late = self._ends = None
        if self._streams is not None:
            self._streams.reset()
        for bucket in self.buckets:
            bucket.reset()

    # -- during backward -----------------------------------------------------------------------

    def begin(self) -> None:
        """A pass begins: no gradient is there that it makes."""
        for bucket in self.singles:
            bucket.begin()

    def ready(self, index: int, parameter: torch.Tensor) -> None:
        """Add a gradient that is ready, and start every bucket that is next in order."""
        bucket = self._bucket_of[index]
        bucket.pending -= 1
        if self._streams is not None:
            self._streams.note(bucket, parameter.device.index)
        if index in self._large:
            self._move(index)
        if not bucket.pending:
            self._start_full()

    def _move(self, index: int) -> None:
        """Move a large gradient into its bucket, unless it is reduced from where it lies."""
        bucket = self._bucket_of[index]
        if not (bucket.single and self._transfer.without_copy):
            bucket.pack_one(self._large[index])

    def leave_out(self, indices: Iterable[int]) -> None:
        """Continue without gradients that this rank does not compute in this pass."""
        for index in indices:
            bucket = self._bucket_of[index]
            bucket.pending -= 1
            bucket.unused.append(bucket.members.index(index))
        self._start_full()

    def fill(self, unused: Sequence[int]) -> None:
        """Add all gradients at once, except missing ones."""
        with torch.no_grad():
            for index in self._large.keys() - set(unused):  # one by one, to free their memory
                self._move(index)
        for bucket in self.buckets:
            bucket.pending = 0
        for index in unused:
            self._bucket_of[index].pending += 1
        self.leave_out(unused)

    def _start_full(self) -> None:
        buckets = self.buckets
        while self._next < len(buckets) and not buckets[self._next].pending:
            self._next += 1
            self._start(buckets[self._next - 1], self._next - 1)
            if self._next == len(buckets) and self.tracks:
                self._usage.share(self._transfer.comm, self._transfer.number)
            if self._next == len(buckets) and self.after_last is not None:
                self.after_last()

    def _start(self, bucket: Any, index: int) -> None:
        last = index + 1 == len(self.buckets)
        if self._transfer.skips and len(bucket.unused) == len(bucket.members):
            # one that was used under no_sync has gradients to be averaged
            if not any(map(self._usage.used, bucket.members)):
                self._ends = self._transfer.closing(bucket) if last else None
                self._transfer.left_out += self._ends is None
                return
        if self._streams is not None:
            self._streams.gather(bucket)
        bucket.pack(self._transfer.without_copy)
        if last and not self.tracks and self._transfer.may_wait(bucket):
            self._late, self._ends = bucket, partial(self._transfer.run, bucket)
        else:
            self._stats.communication_begins()
            bucket.work = self._transfer.start(bucket, index, last)

    # -- the end of a pass ---------------------------------------------------------------------

    @property
    def started(self) -> int:
        """Number of buckets that have started."""
        return self._next - (self._ends is not None)

    @property
    def follows(self) -> int:
        """Number of the group's calls that follow the last bucket in this pass."""
        return int(self.tracks and self._usage.shared)

    @property
    def full(self) -> bool:
        """Whether all buckets are full."""
        return self._next == len(self.buckets)

    def finish(self) -> list[int]:
        """Wait for the averages and distribute them.

        Returns
        -------
        list of int
            Indices of the parameters that this rank did not use.
        """
        self._part_gradients()
        if self._ends is not None:
            self._stats.communication_begins()
            self._wait(self._ends)
        for bucket in self.buckets:
            if bucket.work is not None or bucket is self._late:
                self._take(bucket)
        return [bucket.members[place] for bucket in self.buckets for place in bucket.unused]

    def _part_gradients(self) -> None:
        """Copy gradients that overlap others in memory, before the averages arrive there.

        Parameters that take part through views of the same shape are given views of one gradient.
        """
        parameters = [
            parameter
            for bucket in self.buckets
            if not (bucket.sparse or bucket.as_view)
            for parameter in bucket.parameters
        ]
        for place in overlapping([parameter.grad for parameter in parameters]):
            parameters[place].grad = parameters[place].grad.clone()

    def _take(self, bucket: Any) -> None:
        result = None if bucket.work is None else self._wait(bucket.work.wait)
        keep: Sequence[int] = ()
        if bucket.unused:
            self._wait(self._usage.wait)
            keep = self._usage.unused_anywhere(bucket.members, bucket.unused)
        self._transfer.finish(bucket, result, keep)

    def _unused(self, bucket: Any) -> Sequence[int] | None:
        """Places in a bucket of what no rank uses in this pass; None until that is known."""
        if self.tracks and not self._usage.known:
            return None
        if not bucket.unused or not self._usage.known:
            return ()
        return self._usage.unused_anywhere(bucket.members, bucket.unused)

    def _wait(self, call: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        result = call()
        self._stats.wait_seconds += time.perf_counter() - began
        return result

    def shadow(self, counted: bool) -> None:
        """Run a whole pass with zeros.

        Parameters
        ----------
        counted : bool
            Whether a parameter that no rank uses has no gradient afterwards, as on a rank that
            trains; one of an earlier pass would be stepped with again.
        """
        last = len(self.buckets) - 1
        for index, bucket in enumerate(self.buckets):
            bucket.leave_out()
            bucket.work = self._transfer.start(bucket, index, index == last)
        if self.tracks:
            self._usage.reset()
            self._usage.share(self._transfer.comm, self._transfer.number)
        results = [bucket.work.wait() for bucket in self.buckets]
        self._usage.wait()
        self._part_gradients()
        for bucket, result in zip(self.buckets, results, strict=True):
            keep: Sequence[int] = ()
            if counted:
                keep = self._usage.unused_anywhere(bucket.members, bucket.unused)
            self._transfer.finish(bucket, result, keep)
            for place in keep:
                bucket.parameters[place].grad = None
