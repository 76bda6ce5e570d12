"""Refusals: a rank that cannot make a collective sends the reason to the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import accumulate
from types import TracebackType

from .carrier import Carrier


class refusing_parts:
    """Context manager around an operation that consists of several collectives, its parts.

    An exception on one rank between two parts, such as a signal handler's, stops only this rank:
    the others go on to the next part. So this rank sends them the reason, and all raise at once and
    stay in step. That is not needed if the ranks could not agree on the last part that was begun,
    since no rank goes on after that. Before the first part it acts as :class:`refusing`.

    Parameters
    ----------
    comm : object
        The group's communicator, or the stand-in of a group that cannot be used.
    api : str
        Public name of the operation.
    due : int or callable
        How many parts the operation has; a callable is asked when there is an exception.
    begun : int
        Number of parts before the block.
    waits : int, optional
        Number of parts for which the other ranks wait one by one, by default all. They begin the
        rest at once, so this rank must refuse each of those.
    """

    __slots__ = ("_api", "_begun", "_comm", "_due", "_seq", "_waits")

    def __init__(
        self,
        comm: Carrier,
        api: str,
        due: int | Callable[[], int],
        *,
        begun: int = 0,
        waits: int | None = None,
    ) -> None:
        self._comm, self._api, self._due, self._begun = comm, api, due, begun
        self._seq, self._waits = comm.seq, waits

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            return
        comm, api = self._comm, self._api
        seq = comm.seq
        begun = self._begun + (seq - self._seq) % 2**32
        due = self._due() if callable(self._due) else self._due
        waits = due if self._waits is None else self._waits
        if begun >= due:
            return
        others_arrive = None if begun == 0 else "if agreed" if begun <= waits else "always"
        rest = due - begun if begun >= waits else 1
        comm.refuse(error, api=api, others_arrive=others_arrive, parts=rest)


class refusing_batches(refusing_parts):
    """Like :class:`refusing_parts`, where the ranks begin several parts, then wait for them.

    Parameters
    ----------
    comm : object
        The group's communicator, or the stand-in of a group that cannot be used.
    api : str
        Public name of the operation.
    lengths : callable
        Returns the number of parts of each batch; it is asked when there is an exception.
    """

    __slots__ = ("_lengths",)

    def __init__(self, comm: Carrier, api: str, lengths: Callable[[], Iterable[int]]) -> None:
        super().__init__(comm, api, 0)
        self._lengths = lengths

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            return
        begun = (self._comm.seq - self._seq) % 2**32
        ends = [0, *accumulate(self._lengths())]
        # after a batch the others begin the next one only if they agreed on its last part
        self._due = next((end for end in ends if end > begun), begun)
        self._waits = begun if begun in ends else 0
        super().__exit__(kind, error, trace)


class refusing(refusing_parts):
    """Send an exception in the block to the other ranks, unless an operation was begun there.

    The others are in the collective, or will be: with the reason they raise at once, and all ranks
    stay in step. The exception propagates unchanged. Native operations send their own refusals;
    this class covers what precedes them.

    Parameters
    ----------
    comm : object
        The group's communicator, or the stand-in of a group that cannot be used.
    api : str
        Public name of the operation.
    """

    __slots__ = ()

    def __init__(self, comm: Carrier, api: str) -> None:
        super().__init__(comm, api, 1)
