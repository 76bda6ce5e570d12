"""A barrier that names who is missing, from messages between two ranks at a time.

Unlike :func:`hpcdist.barrier` it does not rest on the entry check, so it works with the check off
and finds the missing ranks of a group whose collectives no longer match.
"""

from __future__ import annotations

import time
import weakref
from array import array
from datetime import timedelta
from typing import Any

from hpcdist._engine import op_range
from hpcdist.errors import DistError, DistTimeoutError
from hpcdist.group import ProcessGroup, _resolve
from hpcdist.process_group import short

__all__ = ["monitored_barrier"]

#: Tag of its messages, beside that of object lists: every MPI leaves tags up to 1022 after the five
#: bits that the engine takes of them.
TAG = 1021

#: Seconds for rank 0's verdict to arrive after its deadline.
_GRACE = 0.5

#: int64 of a greeting: the group, the round.
_HELLO = 2

#: int64 of a verdict: the group, the round, how many ranks are missing, and the first of them.
_WORDS = 64
_HEAD = 3

# How many monitored barriers each group has begun here. Messages carry the group and the number, so
# that one left over from a barrier that failed is not taken for an answer in the next: not in this
# group, nor in a later one, to which MPI may give the communicator's identity again.
_rounds: weakref.WeakKeyDictionary[ProcessGroup, int] = weakref.WeakKeyDictionary()


def monitored_barrier(
    group: ProcessGroup | None = None,
    timeout: timedelta | float | None = None,
    wait_all_ranks: bool = False,
) -> None:
    """Wait until all ranks of the group are here, or say which are not.

    All ranks of the group must call it. Rank 0 of the group hears from each other rank and tells
    them the outcome; use it for debugging, not in a loop.

    Parameters
    ----------
    group : ProcessGroup, optional
        None means the default group.
    timeout : datetime.timedelta or float, optional
        How long to wait; a number is seconds. Zero asks who is here already. None means the
        group's timeout.
    wait_all_ranks : bool
        Accepted for torch's sake: all missing ranks are named either way, because one deadline
        holds for all of them.

    Raises
    ------
    DistTimeoutError
        On all ranks that called. It names the missing ranks; where rank 0 itself did not come in
        time, it says that.
    ValueError
        If the timeout is negative.

    Notes
    -----
    It uses the message tag 1021 of the group. Source: ``torch.distributed.monitored_barrier``.
    """
    pg = _resolve(group)
    comm = pg._comm
    if comm.rank < 0:
        comm.report("monitored_barrier", 3)
        return
    seconds = comm.timeout if timeout is None else _seconds(timeout)
    number = _rounds[pg] = _rounds.get(pg, 0) + 1
    if comm.size == 1:
        return
    with op_range("monitored_barrier", pg._name):
        if comm.rank == 0:
            _lead(pg, number, seconds)
        else:
            _follow(pg, number, seconds)


def _seconds(timeout: timedelta | float) -> float:
    value = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
    if not value >= 0:
        raise ValueError(f"timeout must not be negative, not {timeout}")
    return value


def _receive(comm: Any, source: int, words: int, number: int, deadline: float, first: Any) -> Any:
    """The next message of this round, or None when the deadline passes or the peer is gone."""
    work, message = first or _post(comm, source, words)
    while True:
        try:
            work.wait(max(0.0, deadline - time.monotonic()))
        except DistTimeoutError:
            # left posted, it would swallow a message of the next round
            taken = work.cancel() or work.exception() is not None
            if taken and time.monotonic() >= deadline:
                return None
            if taken:  # the group's timeout is shorter than this barrier's
                work, message = _post(comm, source, words)
                continue
        except DistError:
            return None
        except BaseException:
            work.cancel()
            raise
        if message[0] == comm.uid and message[1] >= number:
            return message
        work, message = _post(comm, source, words)


def _post(comm: Any, source: int, words: int) -> tuple[Any, array[int]]:
    message = array("q", [0]) * words
    return comm.irecv(message, source, TAG), message


def _lead(pg: ProcessGroup, number: int, seconds: float) -> None:
    """Rank 0: hear from all, tell all."""
    comm = pg._comm
    deadline = time.monotonic() + seconds
    posted = {rank: _post(comm, rank, _HELLO) for rank in range(1, comm.size)}
    missing = []
    waiting = dict(posted)
    try:
        for rank, first in posted.items():
            del waiting[rank]
            if _receive(comm, rank, _HELLO, number, deadline, first) is None:
                missing.append(rank)
    finally:  # after Ctrl-C some are still posted
        for work, _ in waiting.values():
            work.cancel()
    verdict = array("q", [comm.uid, number, len(missing), *missing[: _WORDS - _HEAD]])
    verdict.extend([0] * (_WORDS - len(verdict)))
    told = [comm.isend(verdict, rank, TAG) for rank in posted if rank not in missing]
    for work in told:
        try:
            work.wait(_GRACE)
        except DistError:
            continue  # it will time out by itself and say so
    if missing:
        raise DistTimeoutError(_text(pg, missing, len(missing), seconds))


def _follow(pg: ProcessGroup, number: int, seconds: float) -> None:
    """Another rank: say that it is here, wait for the outcome."""
    comm = pg._comm
    deadline = time.monotonic() + seconds + _GRACE
    comm.isend(array("q", [comm.uid, number]), 0, TAG)
    verdict = _receive(comm, 0, _WORDS, number, deadline, None)
    if verdict is None:
        raise DistTimeoutError(
            f"monitored_barrier: after {seconds:g} s rank {pg._ranks[0]}, which leads the group "
            f"{pg._name!r}, gave no answer to rank {pg._ranks[comm.rank]}: it is not in "
            "monitored_barrier, or came so late that it still waits for others"
        )
    count = verdict[2]
    if count:
        missing = list(verdict[_HEAD : _HEAD + min(count, _WORDS - _HEAD)])
        raise DistTimeoutError(_text(pg, missing, count, seconds))


def _text(pg: ProcessGroup, missing: list[int], count: int, seconds: float) -> str:
    ranks = short(tuple(pg._ranks[rank] for rank in missing))
    return (
        f"monitored_barrier: rank(s) {ranks} of the world did not come within {seconds:g} s "
        f"({count} of {len(pg._ranks)} in the group {pg._name!r} are missing; rank "
        f"{pg._ranks[pg._comm.rank]} is here). Look at what those ranks are doing."
    )
