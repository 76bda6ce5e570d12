"""What a rank does with a collective that it cannot make: it tells the others why."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

__all__ = ["parts", "refusing"]


class parts:
    """Around an operation that is made of several collectives, its parts.

    An exception on one rank between two parts, such as a signal handler's, keeps only this rank
    from the next one: the others go on to it. So it tells them why it does not come, and all raise
    at once and stay in step. It need not where the ranks could not agree on the last part that was
    begun, since no rank goes on after that. Before the first part it does as :class:`refusing`.

    Parameters
    ----------
    comm : object
        The group's communicator, or the stand-in of a group that cannot be used.
    api : str
        Public name of the operation.
    due : int or callable
        How many parts the operation has; a callable is asked when there is an exception.
    begun : int
        Parts that were made before the block.
    waits : int, optional
        Parts for which the other ranks wait one by one, by default all. The rest they begin at
        once, so that each one missing here has to be told.
    """

    __slots__ = ("_api", "_begun", "_comm", "_due", "_seq", "_waits")

    def __init__(
        self,
        comm: Any,
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
        if begun == 0:
            comm.refuse(error, api=api)
        else:
            comm.refuse(error, api=api, owed="if agreed" if begun <= waits else "always")
        if begun >= waits and comm.seq != seq:
            for _ in range(due - begun - 1):
                comm.refuse(error, api=api, owed="always")


class refusing(parts):
    """Tell the other ranks of an exception in the block, unless something was begun there.

    They are in the collective, or will be: with the reason they raise at once, and all ranks stay
    in step. The exception goes on unchanged. What the native operations refuse they tell by
    themselves; this is for what comes before them.

    Parameters
    ----------
    comm : object
        The group's communicator, or the stand-in of a group that cannot be used.
    api : str
        Public name of the operation.
    """

    __slots__ = ()

    def __init__(self, comm: Any, api: str) -> None:
        super().__init__(comm, api, 1)
