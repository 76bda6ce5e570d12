"""Exceptions of hpcdist.

Everything that goes wrong at run time between processes is a :class:`DistError`, so one
``except hpcdist.DistError`` catches it. Wrong arguments are plain ``ValueError`` and ``TypeError``
and are raised before anything is sent.

This module is a leaf: it imports nothing of hpcdist, so every other module may import it.
"""

from __future__ import annotations

from contextlib import suppress
from typing import NamedTuple

__all__ = [
    "DistBackendError",
    "DistError",
    "DistMismatchError",
    "DistNaNError",
    "DistNetworkError",
    "DistStoreError",
    "DistTimeoutError",
    "QueueEmptyError",
    "RankFailedError",
    "Refusal",
    "StoreTimeoutError",
]


class Refusal(NamedTuple):
    """Why an operation failed on this rank: others could not make it.

    Attributes
    ----------
    ranks : tuple of int
        The first 16 of those that gave the same reason, as ranks of the group, in order.
    reason : str
        The reason that they gave.
    total : int
        How many they are.
    """

    ranks: tuple[int, ...]
    reason: str
    total: int

    def __str__(self) -> str:
        more = f" and {self.total - len(self.ranks)} more" if self.total > len(self.ranks) else ""
        plural = "s" if self.total > 1 else ""
        return f"rank{plural} {', '.join(map(str, self.ranks))}{more}"


def mark_told(error: BaseException) -> None:
    """Note that an operation ended with an error: no other form of it may be tried."""
    with suppress(AttributeError, TypeError):  # of a class that takes no attributes
        error._hpcdist_told = True  # type: ignore[attr-defined]


def was_told(error: BaseException) -> bool:
    """Whether :func:`mark_told` was called with an error."""
    return hasattr(error, "_hpcdist_told")


class DistError(RuntimeError):
    """Base of every error that hpcdist raises at run time.

    The message says what happened, where (rank, group, operation, sequence number) and what to do.

    Attributes
    ----------
    refusal : Refusal or None
        Which ranks could not make the operation, and why, if it failed because of that.
    in_step : bool
        Of an error of a collective: whether all ranks have made the same one, and it failed on
        all of them before data moved. They can go on together. Says nothing of a message.
    """

    refusal: Refusal | None = None
    in_step = False


class DistBackendError(DistError):
    """A backend (MPI, NCCL) reported an error, or is not usable in this process."""


class DistNetworkError(DistError):
    """An address could not be reached, bound or understood while processes were meeting."""


class DistStoreError(DistError):
    """A key-value store failed, or a key that was asked for is not there."""


class QueueEmptyError(DistStoreError):
    """A store's queue had nothing to pop and the caller asked not to wait."""


class DistTimeoutError(DistError, TimeoutError):
    """A peer did not arrive within the timeout.

    It is also a :class:`TimeoutError`, so code that knows nothing of hpcdist can catch it. The
    message names the ranks that are missing and what the others are in, as far as they are known.
    """


class StoreTimeoutError(DistStoreError, DistTimeoutError):
    """A store did not have a key, or did not answer, within the timeout.

    Both a :class:`DistStoreError`, as torch raises here, and a :class:`DistTimeoutError`. The
    message names the keys that are missing and the store or server.
    """


class DistMismatchError(DistError):
    """The ranks of a group called different operations, or one operation with different arguments.

    Raised on all ranks of the group before any data has moved: the group stays usable, unless the
    message says that a rank has destroyed it, or dropped all references to it.
    """


class DistNaNError(DistError):
    """A rank's input contains a NaN, and that rank looks for NaNs: ``HPCDIST_NAN_CHECK``.

    Of a collective it is raised on all ranks of the group before any data has moved: the group
    stays usable. :attr:`refusal` says on which ranks the NaNs are. Of a message it is raised where
    the message is sent, if that rank looks, and where it is received, if that one does.
    """

    in_step = True


class RankFailedError(DistError):
    """A process of the group died or can no longer be reached.

    Attributes
    ----------
    ranks : tuple of int
        Where the job goes on without them, the ranks of the world that have died, as far as this
        process knew then; else empty. See :meth:`hpcdist.ProcessGroup.reconfigure`.
    """

    ranks: tuple[int, ...] = ()


def checked_async(async_op: object) -> bool:
    """Return whether an operation is to be asynchronous; options in that place are refused.

    Their truth value would hide that they are ignored.
    """
    if hasattr(async_op, "asyncOp"):  # one of c10d's classes of options
        raise TypeError(
            f"async_op must be True or False, not {type(async_op).__name__}: of a group's methods, "
            "barrier, allreduce, allgather, alltoall and their forms take torch's options, the "
            "others the arguments of the public functions"
        )
    return bool(async_op)


def forked_error(library: str) -> DistError:
    """Make the error of a child that was forked after a library (MPI, NCCL) had been started."""
    return DistError(
        f"hpcdist was started before this process was forked; {library} does not survive a fork. "
        "Start worker processes with multiprocessing's 'spawn' or 'forkserver', or fork before "
        "init_process_group"
    )
