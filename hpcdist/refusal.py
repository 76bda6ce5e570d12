"""What a rank does with a collective that it cannot even begin: it tells the others why."""

from __future__ import annotations

from types import TracebackType
from typing import Any

__all__ = ["refusing"]


class refusing:
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

    __slots__ = ("_api", "_comm", "_seq")

    def __init__(self, comm: Any, api: str) -> None:
        self._comm, self._api = comm, api
        self._seq = comm.seq

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, Exception) and self._comm.seq == self._seq:
            self._comm.refuse(error, api=self._api)
