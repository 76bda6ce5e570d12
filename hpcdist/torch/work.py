"""A native Work in the form that torch.distributed and its C++ parts expect."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import Work

from hpcdist.backends import cuda
from hpcdist.flight_recorder import Entry
from hpcdist.groups.reconfigure import Reconfigured

_ZERO = timedelta(0)

#: Seconds in which the operations behind one that has failed end as a rule.
_REST = 1.0


def limit_of(timeout: timedelta | None) -> timedelta | None:
    """Return a timeout that torch passes: zero and less mean that none is set."""
    return timeout if timeout is not None and timeout > _ZERO else None


def flat(outputs: Sequence[Any]) -> list[Any]:
    """Return the tensors of a list of tensors or of lists of them."""
    return [tensor for each in outputs for tensor in (each if isinstance(each, list) else (each,))]


def _whole(output: Any) -> Any:
    """Return one tensor for a list of tensors of one shape; anything else as it is."""
    same = isinstance(output, list) and len({tensor.shape for tensor in output}) == 1
    return torch.stack(output) if same else output


def _future_for(outputs: Sequence[Any]) -> torch.futures.Future[list[Any]]:
    """A future that may hold these tensors: those on a GPU belong to their streams."""
    for tensor in flat(outputs):
        if tensor.device.type == "cuda":
            made: torch.futures.Future[list[Any]] = cuda.runtime().promise(tensor.device.index)
            return made
    return torch.futures.Future()


class _Failure:
    """The value of a future whose operation failed.

    ``Future.set_exception`` stores the exception as an ordinary value, which only Python raises.
    DDP's reducer in C++ looks for tensors in the value by pickling it; it finds none in an
    exception, takes the first one nevertheless, and crashes. Pickling this value raises the error.

    Parameters
    ----------
    error : Exception
        The operation's error.
    """

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise self._error

    def end(self, future: torch.futures.Future[Any]) -> None:
        """Complete a future so that waiting for it raises the error, in Python and in C++."""

        def unwrap(_value: Any) -> Any:
            raise self._error

        future._set_unwrap_func(unwrap)
        future.set_result(self)


def _outputs_after(
    operation: torch.futures.Future[Any],
    outputs: list[Any],
    parts: Sequence[torch.futures.Future[Any]] = (),
    stacks: bool = True,
) -> torch.futures.Future[list[Any]]:
    """Make a future of an operation's outputs; it holds the error if the operation fails.

    A list among the outputs, as all_gather has one, becomes one tensor, a row for each rank: so it
    is with nccl, and torch's hooks count on it. `parts`: the futures that `operation` is made of.
    `stacks`: False leaves lists as they are.
    """
    done = _future_for(outputs)

    def hand_over(future: torch.futures.Future[Any]) -> None:
        try:
            future.value()
            for part in parts:
                part.wait()  # complete; it lets this thread's streams wait for the part's
        except Exception as error:
            _Failure(error).end(done)
        else:
            done.set_result([_whole(output) if stacks else output for output in outputs])

    operation.add_done_callback(hand_over)
    return done


class BridgeWork(Work):
    """An operation in flight.

    Parameters
    ----------
    native : hpcdist.Work
        The operation.
    tensors : list of torch.Tensor, or of lists of them
        Its outputs: what the future holds. Kept alive until the operation is done.
    entry : Entry, optional
        The flight recorder's, which records how the operation ends.

    Attributes
    ----------
    stacks : bool
        Whether the future holds one tensor for a list of them.
    """

    def __init__(self, native: Any, tensors: list[Any], entry: Entry | None = None) -> None:
        super().__init__()
        self._entry = entry
        if entry is not None:
            entry.follow(native)
        self._native = native
        self._tensors = tensors
        self.stacks = True
        self._future: torch.futures.Future[list[Any]] | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the operation is done; raise its error."""
        try:
            return bool(self._native.wait(limit_of(timeout)))
        except Exception:
            if self._entry is not None:
                self._entry.failed()
            raise

    def synchronize(self) -> None:
        """Let the caller's current stream wait, where the tensors are a GPU's; else wait."""
        self._native.synchronize()

    def block_current_stream(self) -> None:
        """Let the caller's current stream wait, as :meth:`synchronize`."""
        self._native.block_current_stream()

    def is_completed(self) -> bool:
        """Whether it is done, well or not."""
        return bool(self._native.is_completed())

    def is_success(self) -> bool:
        """Whether it is done and went well."""
        return bool(self._native.is_success())

    def exception(self) -> Exception | None:
        """Return its error; None while there is none."""
        return self._native.exception()

    def result(self) -> list[Any]:
        """Return its outputs."""
        return flat(self._tensors)

    def source_rank(self) -> int:
        """Return the group rank that a receive from any rank has received from."""
        return int(self._native.source_rank())

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[list[Any]]:
        """Return a future of the outputs; it holds the error if the operation fails."""
        if self._future is None:
            self._future = _outputs_after(
                self._native.get_future(), self._tensors, stacks=self.stacks
            )
        return self._future


class FinishedWork(Work):
    """A finished operation, which a synchronous call returns.

    Parameters
    ----------
    tensors : list of torch.Tensor
        Its outputs.
    """

    def __init__(self, tensors: list[Any]) -> None:
        super().__init__()
        self._tensors = tensors

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return at once."""
        return True

    def synchronize(self) -> None:
        """Return at once."""

    def is_completed(self) -> bool:
        """Return True."""
        return True

    is_success = is_completed

    def exception(self) -> None:
        """Return None: a failed synchronous call has raised."""

    def result(self) -> list[Any]:
        """Return its outputs."""
        return self._tensors

    def get_future(self) -> torch.futures.Future[list[Any]]:
        """Return a completed future of the outputs."""
        done = _future_for(self._tensors)
        done.set_result(self._tensors)
        return done


class ReconfiguredWork(FinishedWork):
    """A group that was reconfigured.

    Parameters
    ----------
    done : hpcdist.groups.reconfigure.Reconfigured
        What it found. Its ``lost``, ``ranks`` and ``seconds`` are attributes.
    """

    def __init__(self, done: Reconfigured) -> None:
        super().__init__([])
        self.lost, self.ranks, self.seconds = done.lost, done.ranks, done.seconds


def _until(end: float) -> timedelta:
    """How long it is until then, of ``time.monotonic``; never zero, which means no limit."""
    return max(timedelta(seconds=end - time.monotonic()), timedelta.resolution)


class AllOf(Work):
    """Several operations as one.

    Parameters
    ----------
    works : sequence of Work
        The operations.
    """

    def __init__(self, works: Sequence[Any]) -> None:
        super().__init__()
        self._works = list(works)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until all are done; raise the first error.

        Those behind one that has failed fail as a rule, too: it takes note of their errors.
        """
        limit = limit_of(timeout)
        end = None if limit is None else time.monotonic() + limit.total_seconds()
        waiting = iter(self._works)
        try:
            for work in waiting:
                work.wait(None if end is None else _until(end))
        except Exception:
            end = time.monotonic() + _REST
            for other in waiting if work.is_completed() else ():
                with contextlib.suppress(Exception):
                    other.wait(_until(end))
            raise
        return True

    def synchronize(self) -> None:
        """Wait as :meth:`wait` does."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether all are done, well or not."""
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        """Whether all are done and went well."""
        return all(work.is_success() for work in self._works)

    def exception(self) -> Exception | None:
        """Return the first error; None while there is none."""
        return next((e for e in (work.exception() for work in self._works) if e), None)

    def result(self) -> list[Any]:
        """Return the outputs of all, in order."""
        return [tensor for work in self._works for tensor in work.result()]

    def get_future(self) -> torch.futures.Future[list[Any]]:
        """Return a future of the outputs of all."""
        parts = [work.get_future() for work in self._works]
        return _outputs_after(torch.futures.collect_all(parts), self.result(), parts)
