"""The handle of an operation of NCCL in flight."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from hpcdist._nccl import Watch
from hpcdist.errors import DistTimeoutError

__all__ = ["NcclWork"]


class NcclWork:
    """An operation on a stream.

    Parameters
    ----------
    runtime : object
        Of :mod:`hpcdist.backends.nccl.device`.
    index : int
        The device.
    stream : object
        Where the operation is.
    watch : Watch
        What the watchdog knows of it.
    event : object
        Reached when the operation is done.
    tensors : list
        Held until the operation is waited for.
    blocks : bool
        Whether ``wait()`` stops the caller, as for a barrier.
    source : int
        Rank that a receive is from; -1 for other operations.

    Notes
    -----
    Made by operations with ``async_op=True``. Source: ``torch.distributed.Work``.
    """

    __slots__ = (
        "_blocks",
        "_brings",
        "_event",
        "_index",
        "_result",
        "_runtime",
        "_source",
        "_stream",
        "_tensors",
        "_watch",
    )

    def __init__(
        self,
        runtime: Any,
        index: int,
        stream: Any,
        watch: Watch,
        event: Any,
        tensors: list[Any],
        blocks: bool = False,
        source: int = -1,
    ) -> None:
        self._runtime = runtime
        self._index = index
        self._stream = stream
        self._watch = watch
        self._event = event
        self._tensors = tensors
        self._result = tensors
        self._blocks = blocks
        self._source = source
        self._brings: list[tuple[Any, Any]] = []

    def brings(self, copies: list[tuple[Any, Any]]) -> None:
        """Let ``wait()`` stop the caller, and copy tensors into host arrays then.

        Parameters
        ----------
        copies : list of (tensor, numpy.ndarray)
            From where, and to where. The arrays are the result.
        """
        self._blocks = True
        self._brings = copies
        self._result = [array for _, array in copies]

    def wait(self, timeout: float | timedelta | None = None) -> bool:
        """Let the caller's stream wait for the operation; with a timeout, wait here.

        Parameters
        ----------
        timeout : float or datetime.timedelta, optional
            Seconds. None: the caller goes on at once, and its current stream waits.

        Returns
        -------
        bool
            True.

        Raises
        ------
        DistTimeoutError
            If the operation is not done in this time, or was aborted because it took longer than
            the group's timeout.
        DistBackendError, RankFailedError
            What NCCL reported.
        """
        if timeout is not None or self._blocks:
            self._block(timeout)
        self._raise()
        self._runtime.order(self._runtime.current(self._index), self._event)
        copies, self._brings = self._brings, []
        for tensor, array in copies:
            self._runtime.download(tensor, array)
        self._tensors = []
        return True

    def _block(self, timeout: float | timedelta | None) -> None:
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        if seconds is not None and seconds < 0:
            raise ValueError(f"timeout must not be negative, but is {seconds} s")
        # without one, the watchdog keeps the time
        state = self._watch.wait(1e9 if seconds is None else seconds)
        if state == Watch.RUNS:
            raise DistTimeoutError(f"{self._watch.what} is not done after {seconds:g} s of wait()")

    def _raise(self) -> None:
        error = self._watch.error()
        if error is not None:
            raise error

    def synchronize(self) -> None:
        """Let the caller's current stream wait for the operation."""
        self._raise()
        self._runtime.order(self._runtime.current(self._index), self._event)

    block_current_stream = synchronize

    def is_completed(self) -> bool:
        """Say whether the operation is over, well or not."""
        return self._watch.wait(0.0) != Watch.RUNS

    def is_success(self) -> bool:
        """Say whether it is over and went well."""
        return self._watch.wait(0.0) == Watch.DONE

    def exception(self) -> Exception | None:
        """What went wrong, if anything has."""
        return self._watch.error()

    def result(self) -> list[Any]:
        """The tensors of the operation."""
        return [each for each in self._result if each is not None]

    def source_rank(self) -> int:
        """Group rank that a receive is from; -1 for other operations."""
        return self._source

    def get_future(self) -> Any:
        """A ``torch.futures.Future`` of the result, ordered after the operation's stream."""
        self._raise()
        return self._runtime.future(self._index, self._stream, self.result())

    @property
    def released(self) -> bool:
        """Whether nobody looks at the event any more, so that it may go away."""
        return self._watch.released

    def abandon(self) -> None:
        """Nothing more will happen to the tensors."""
        self._tensors = []
