"""The figures of a DistributedDataParallel, as the object that torch has for them."""

from __future__ import annotations

from typing import Any

from hpcdist.errors import DistError


class Logger:
    """Reads and marks the logging data of a reducer.

    Parameters
    ----------
    reducer : Reducer
        Whose figures.

    Notes
    -----
    Local. Source: ``torch.distributed.Logger``.
    """

    def __init__(self, reducer: Any) -> None:
        self._stats = reducer.stats

    def set_error_and_log(self, error: str) -> None:
        """Record a text as the ``error`` of the logging data.

        Parameters
        ----------
        error : str
            The text.
        """
        self._stats.failed(DistError(error))

    def _set_comm_hook_name(self, comm_hook: str) -> None:
        self._stats.describe(comm_hook=comm_hook)

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        """Figures under the names of torch's DDP logging data; times in nanoseconds."""
        data: dict[str, Any] = self._stats.data()
        return data
