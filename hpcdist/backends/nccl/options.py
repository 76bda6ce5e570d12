"""Options of a group over NCCL."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hpcdist import config


@dataclass(frozen=True)
class NCCLOptions:
    """Options of the NCCL backend, for the argument ``pg_options``.

    Parameters
    ----------
    blocking : bool, optional
        False makes communicators that return before they are done, for which NCCL starts a
        thread at each operation. None means the setting ``HPCDIST_NCCL_BLOCKING``.
    check : bool, optional
        Compare what the ranks call before each collective, over MPI on the host, as groups over MPI
        do. Costs some microseconds and waits for the other ranks' calls. None means the setting
        ``HPCDIST_NCCL_CHECK``.
    high_priority : bool, optional
        Run asynchronous operations on a stream of high priority. None means the setting
        ``HPCDIST_NCCL_HIGH_PRIORITY``, which is on.

    Notes
    -----
    Every member of the group must pass the same. Source: the idea of
    ``torch.distributed.ProcessGroupNCCL.Options``.
    """

    #: The backend these options are for.
    backend: ClassVar[str] = "nccl"

    blocking: bool | None = None
    check: bool | None = None
    high_priority: bool | None = None

    @property
    def blocks(self) -> bool:
        """Whether communicators are made with blocking=1."""
        return bool(config.get("nccl_blocking") if self.blocking is None else self.blocking)

    @property
    def urgent(self) -> bool:
        """Whether asynchronous operations get a stream of high priority."""
        chosen = config.get("nccl_high_priority")
        return bool(chosen if self.high_priority is None else self.high_priority)

    @property
    def checks(self) -> bool:
        """Whether the entry check is asked for."""
        return bool(config.get("nccl_check") if self.check is None else self.check)
