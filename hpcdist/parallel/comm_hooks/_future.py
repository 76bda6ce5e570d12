"""The futures that communication hooks return."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from contextlib import suppress
from typing import Any

import torch

from hpcdist.errors import DistError


class Driven(torch.futures.Future):
    """A future that the waiting thread completes.

    The callbacks of an ordinary future run in the thread that completes it, at any time, and their
    exceptions lose their type. Here what comes after the communication (decompressing, an optimizer
    step) runs where DDP waits, at the end of backward, in the order of the buckets on all ranks; an
    error of the engine comes out of ``backward()`` as what it is. Wait for it with ``wait()``:
    ``torch.futures.collect_all`` and its like do not drive it.

    Parameters
    ----------
    drive : callable
        Called once, without arguments; returns the value.
    settle : callable
        Called in its place where the backward pass is given up: waits for the communication that
        has begun, and begins no other.
    """

    def __init__(self, drive: Callable[[], torch.Tensor], settle: Callable[[], Any]) -> None:
        super().__init__()
        self._drive: Callable[[], torch.Tensor] | None = drive
        self._settle = settle
        self._error: BaseException | None = None

    def wait(self) -> Any:
        """Complete it, once, and return its value."""
        if self._error is not None:
            raise self._error
        drive, self._drive = self._drive, None
        if drive is not None:
            try:
                self.set_result(drive())
            except BaseException as error:
                self._error = error
                raise
        return super().wait()

    def give_up(self) -> None:
        """Wait for what has begun, unless it is complete; what would have followed is dropped.

        Peers may have given up elsewhere in the same pass. A collective that this rank began now
        would meet another of theirs, and a step would be taken by some ranks only.
        """
        if self._drive is None:
            return
        try:
            self._settle()
        except DistError:
            self._forget()
            raise
        self._forget()  # not after a handler's exception: what has begun is waited for again

    def _forget(self) -> None:
        self._drive = None
        self._error = RuntimeError("the backward pass of this bucket was given up")

    def value(self) -> Any:
        """Complete it, once, and return its value, as :meth:`wait` does."""
        return self.wait()

    def then(self, callback: Callable[[Any], Any]) -> Any:
        """Return a future of the result of `callback` on this one, completed through this one."""

        def drive() -> Any:
            self.wait()
            return callback(self)

        return Driven(drive, self.give_up)


#: Yields handles of collectives, and returns the result.
Stages = Generator[Any, None, torch.Tensor]


class Pipeline:
    """Hooks of several dependent collectives, advanced in the same order on all ranks.

    Each stage of a bucket waits for a collective and starts the next. They advance when the next
    bucket comes, so that a stage's collective runs while backward computes, and to the end when
    a caller waits. What starts which collective depends on the order of the buckets alone, never
    on which message happens to arrive first, so all ranks start them in the same order.
    """

    def __init__(self) -> None:
        self._running: deque[_Run] = deque()

    def start(self, stages: Stages, first: bool) -> Driven:
        """Advance what runs by one stage, begin `stages`, and return the future of its result.

        Parameters
        ----------
        stages : generator
            The collectives of a bucket.
        first : bool
            Whether it is the first of a backward pass. What still runs is of one that failed.
        """
        if first:
            self._drop()
        for run in list(self._running):
            self._advance(run)
        run = _Run(stages)
        self._running.append(run)
        self._advance(run)
        return Driven(lambda: self._finish(run), lambda: self._give_up(run))

    def _advance(self, run: _Run) -> None:
        try:
            if run.work is not None:
                run.work.wait()
            run.work = next(run.stages)
        except StopIteration as end:
            run.result = end.value
            if run in self._running:
                self._running.remove(run)
        except BaseException:
            # No stage of a failed backward pass may continue in the next one.
            self._running.clear()
            raise

    def _finish(self, run: _Run) -> torch.Tensor:
        while run.result is None:
            self._advance(run)
        return run.result

    def _give_up(self, run: _Run) -> None:
        if run.result is None and run.work is not None:
            run.work.wait()
        if run in self._running:
            self._running.remove(run)

    def _drop(self) -> None:
        while self._running:
            with suppress(DistError):  # of a pass whose error was raised already
                self._give_up(self._running[0])
                continue
            self._running.popleft()


class _Run:
    __slots__ = ("result", "stages", "work")

    def __init__(self, stages: Stages) -> None:
        self.stages = stages
        self.work: Any = None
        self.result: torch.Tensor | None = None
